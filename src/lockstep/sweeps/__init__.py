"""Sweeps: the table of jobs, a process for each job, and what a sweep shows at its end."""
