"""What to do next: sort what is there, record what became true, decide, finish."""
