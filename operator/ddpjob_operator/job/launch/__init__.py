"""How a trainer's command launches its ranks: the launcher in it, and the shell script around the launcher.

In:   the words of a command, or the text of a script.
Out:  launcher, options and script of a command; the variables that a script reads, and if it loses the exit code.
Called by: facts.py and launcher.py for a job's spec, and the programs that read commands of users.
Must not run or expand anything, and must not know a job.
"""
