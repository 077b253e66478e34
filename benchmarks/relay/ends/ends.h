/* What the two ends of the relay benchmark share: errors, the clock, epoll, loopback sockets.
 *
 * Both ends share one core (the proxy has the other), so each must cost less than the cheapest
 * proxy: one thread, epoll, nothing copied that need not be, replies built once and sent again.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 256 };

static int poller;

static void die(const char *what) { fprintf(stderr, "wire: %s: %s\n", what, strerror(errno)); exit(1); }
static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}
static void watch(int fd, void *who, uint32_t events, int how) {
    struct epoll_event event = {.events = events, .data.ptr = who};
    if (epoll_ctl(poller, how, fd, &event)) die("epoll_ctl");
}
static struct sockaddr_in local(int port) {
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}
static void no_delay(int fd) {
    int on = 1;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on)) die("TCP_NODELAY");
}
