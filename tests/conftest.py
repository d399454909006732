"""One thread per process. Several tests fork, and a child forked from a process whose OpenMP
threads have run waits for them for ever; and on two cores, several processes with two threads
each crawl."""
import torch

torch.set_num_threads(1)
