"""Work on a job: queue it, read what no watch shows, plan, carry out the plan, log it and send Events."""
