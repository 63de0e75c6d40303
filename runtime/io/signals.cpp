#include <unistd.h>

#include <csignal>
#include <initializer_list>

#include "runtime/io/io.h"

// The one variable that the whole program shares: a handler can reach nothing else.
static volatile std::sig_atomic_t first_signal = 0;

static void request_stop(int signal) {
    const bool is_impatient = signal == SIGINT || signal == SIGTERM;
    if (first_signal != 0 && is_impatient) ::_exit(128 + signal);
    if (first_signal == 0) first_signal = signal;
}

void install_signal_handlers() {
    struct sigaction stop {};
    stop.sa_handler = request_stop;
    stop.sa_flags = SA_RESTART;
    sigemptyset(&stop.sa_mask);
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGUSR2}) sigaction(signal, &stop, nullptr);
    for (int signal : {SIGHUP, SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
}

int stop_signal() { return first_signal; }
