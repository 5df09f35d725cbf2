"""What `scripts/gpu_check` runs: parts that each measure or check one thing on a GPU, in processes of their own.

__main__    options; as a parent it conducts, as a child it runs the parts it is told to
parts       the table of parts: order, time, which share a process
conductor   starts the children, kills those that hang, writes what they found after each part; loads no JAX
child       runs parts one after the other, and tells of each row as it is found
verdicts    what was to be expected, and whether it was met
sizes       how much is measured: on a card, or where numbers mean nothing
timing      times of one kernel, taken inside one program
the rest    the parts
"""
