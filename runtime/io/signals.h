// Requests from outside to stop.
#pragma once

// From now on SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 only set a flag, which the trainer reads between steps to save and
// exit with Exit::again. (mpirun hands SIGUSR1 and SIGUSR2 on to the ranks, where SIGTERM makes it kill them soon.) A
// SIGINT or SIGTERM after that ends the process at once with 128 + its number, as the shell reports it: nothing was
// committed, and nothing that is committed is open for writing. SIGHUP, SIGPIPE and SIGXFSZ are ignored, so that a
// closed terminal, a closed pipe and a file size limit are errors of a write and not deaths.
void install_signal_handlers();

// The first signal that asked to stop, or 0.
int stop_signal();
