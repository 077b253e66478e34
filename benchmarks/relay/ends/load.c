/* load PORT CONNECTIONS WARMUP_S SECONDS SPREAD_MS FILE: requests over keep-alive connections.
 *
 * Closed loop: each connection sends its next request when the last reply is whole. FILE holds the
 * requests: 8 bytes of length (little endian), then the bytes. Connections start spread over
 * SPREAD_MS, so that streams do not end together. Prints `begin` and `end` around the measured
 * window, then one line of JSON. Histograms are [nanoseconds, count], 128 buckets to a doubling, so
 * a value is at most 0.4 % off. An event is what a blank line ends.
 */
#include "ends.h"

enum { READ = 1 << 18 };
static char scratch[READ];

typedef struct { const char *at; size_t size; } Request;
enum { OCTAVES = 40, STEPS = 128 };
typedef struct { uint64_t count[OCTAVES * STEPS]; } Histogram;
typedef enum { HEAD, LENGTH, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER } State;
typedef struct {
    int fd, request;
    size_t sent, left, head_size;
    uint64_t began, starts;
    State state;
    int status, closes, newline, trailing;
    uint64_t blocks;      /* blank lines seen: one ends each event */
    char head[8192];
} Client;

static Request *requests;
static int request_count, target;
static Histogram latency, first_byte;
static uint64_t done, replies_ever, events_seen, bytes_in, refused, broken, reconnects, fewest = UINT64_MAX, most;

static void record(Histogram *histogram, uint64_t ns) {
    int octave = ns < STEPS ? 0 : 63 - __builtin_clzll(ns) - 6;
    uint64_t step = octave ? (ns >> (octave - 1)) - STEPS : ns;  /* 128 equal steps in each doubling */
    if (octave < OCTAVES) histogram->count[octave * STEPS + (int)step]++;
}
static void print_histogram(const char *name, const Histogram *histogram) {
    printf("\"%s\":[", name);
    for (int i = 0, some = 0; i < OCTAVES * STEPS; i++) {
        if (!histogram->count[i]) continue;
        int octave = i / STEPS, width = octave ? octave - 1 : 0;
        uint64_t low = octave ? ((uint64_t)(STEPS + i % STEPS)) << width : (uint64_t)i;
        printf("%s[%llu,%llu]", some++ ? "," : "", (unsigned long long)(low + (1ull << width) / 2), (unsigned long long)histogram->count[i]);
    }
    printf("]");
}
static void push(Client *client) {
    Request *request = &requests[client->request];
    while (client->sent < request->size) {
        ssize_t sent = send(client->fd, request->at + client->sent, request->size - client->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EAGAIN) watch(client->fd, client, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            return;  /* an error shows when it is read */
        }
        client->sent += (size_t)sent;
    }
}
static void ask(Client *client) {
    client->request = (client->request + 1) % request_count;
    client->sent = client->head_size = 0;
    client->state = HEAD;
    client->blocks = 0;
    client->newline = 0;
    client->began = now_ns();
    push(client);
}
static void open_client(Client *client) {
    struct sockaddr_in address = local(target);
    client->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (client->fd < 0 || connect(client->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    no_delay(client->fd);
    watch(client->fd, client, EPOLLIN, EPOLL_CTL_ADD);
    ask(client);
}
static void reopen(Client *client) { close(client->fd); reconnects++; open_client(client); }
static void count_blocks(Client *client, const char *at, size_t size) {
    const char *end = at + size, *line = at;
    while ((line = memchr(line, '\n', (size_t)(end - line)))) {
        if (line > at ? line[-1] == '\n' : client->newline) client->blocks++;
        line++;
    }
    if (size) client->newline = end[-1] == '\n';
}
static void finish(Client *client) {
    if (client->status == 200) {
        done++;
        record(&latency, now_ns() - client->began);
        if (client->blocks < fewest) fewest = client->blocks;
        if (client->blocks > most) most = client->blocks;
    } else refused++;
    replies_ever++;
    events_seen += client->blocks;
    client->blocks = 0;
    if (client->closes) reopen(client);
    else ask(client);
}
static size_t read_head(Client *client, const char *at, size_t size) {  /* returns how much was taken */
    size_t before = client->head_size, take = size < sizeof client->head - before - 1 ? size : sizeof client->head - before - 1;
    memcpy(client->head + before, at, take);
    client->head_size += take;
    client->head[client->head_size] = 0;
    char *end = strstr(client->head, "\r\n\r\n");
    if (!end) { if (client->head_size + 1 == sizeof client->head) errno = EMSGSIZE, die("a reply's head"); return take; }
    end[2] = 0;
    client->status = atoi(client->head + 9);
    client->closes = strcasestr(client->head, "\r\nconnection: close") != NULL;
    char *length = strcasestr(client->head, "\r\ncontent-length:");
    client->state = length ? LENGTH : CHUNK_SIZE;
    client->left = length ? strtoul(length + 17, NULL, 10) : 0;
    if (!length && !strcasestr(client->head, "\r\ntransfer-encoding: chunked")) errno = EPROTO, die("a reply without length");
    record(&first_byte, now_ns() - client->began);
    return (size_t)(end + 4 - client->head) - before;
}
static int read_chunked(Client *client, const char *at, size_t size) {  /* 1: the reply is whole */
    for (size_t i = 0; i < size;) {
        if (client->state == CHUNK_DATA) {
            size_t take = client->left < size - i ? client->left : size - i;
            count_blocks(client, at + i, take);
            client->left -= take;
            i += take;
            if (!client->left) client->state = CHUNK_END;
            continue;
        }
        char c = at[i++];
        if (client->state == CHUNK_END) { if (c == '\n') client->state = CHUNK_SIZE; continue; }
        if (client->state == TRAILER) {  /* after the last chunk: nothing but a blank line is awaited */
            if (c == '\n' && !client->trailing) return 1;
            client->trailing = c != '\n' && c != '\r';
            continue;
        }
        if (c == '\n') {
            client->state = client->left ? CHUNK_DATA : TRAILER;
            client->trailing = 0;
        } else if (c != '\r') {
            if (!isxdigit((unsigned char)c)) errno = EPROTO, die("a chunk's size");
            client->left = client->left * 16 + (size_t)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
        }
    }
    return 0;
}
static void pull(Client *client) {
    ssize_t got = recv(client->fd, scratch, sizeof scratch, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) { broken++; reopen(client); return; }
    bytes_in += (uint64_t)got;
    size_t size = (size_t)got, taken = 0;
    if (client->state == HEAD) taken = read_head(client, scratch, size);
    if (client->state == HEAD) return;
    if (client->state == LENGTH) {
        client->left -= size - taken < client->left ? size - taken : client->left;
        if (!client->left) finish(client);
    } else if (read_chunked(client, scratch + taken, size - taken)) finish(client);
}
static void load_requests(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    uint64_t size;
    while (fread(&size, sizeof size, 1, file) == 1) {
        char *at = malloc(size);
        if (!at || fread(at, 1, size, file) != size) die(path);
        requests = realloc(requests, sizeof *requests * (size_t)(request_count + 1));
        requests[request_count++] = (Request){at, size};
    }
    fclose(file);
    if (!request_count) errno = ENODATA, die(path);
}
static uint64_t in_flight_blocks(Client *clients, int connections) {
    uint64_t sum = 0;
    for (int i = 0; i < connections; i++) sum += clients[i].blocks;
    return sum;
}
static void run_load(int connections, double warmup_s, double seconds, double spread_ms) {
    struct epoll_event events[EVENTS];
    Client *clients = calloc((size_t)connections, sizeof *clients);
    uint64_t start = now_ns(), begin = start + (uint64_t)(warmup_s * 1e9), began = 0;
    uint64_t stop = begin + (uint64_t)(seconds * 1e9), now;
    uint64_t before = 0;  /* events of replies in flight when the window began */
    int opened = 0;
    for (; (now = now_ns()) < stop || !began;) {
        while (opened < connections && now >= start + (uint64_t)(spread_ms * 1e6 * opened / connections)) {
            clients[opened].request = opened * 7 % request_count;
            open_client(&clients[opened++]);
        }
        if (!began && now >= begin) {
            began = now;
            stop = began + (uint64_t)(seconds * 1e9);  /* a window that opens late is as long as any */
            memset(&latency, 0, sizeof latency);
            memset(&first_byte, 0, sizeof first_byte);
            done = events_seen = bytes_in = refused = broken = reconnects = most = 0;
            fewest = UINT64_MAX;
            before = in_flight_blocks(clients, connections);
            puts("begin");
            fflush(stdout);
        }
        int count = epoll_wait(poller, events, EVENTS, opened < connections ? 0 : 10);
        for (int i = 0; i < count; i++) {
            Client *client = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) {
                push(client);
                if (client->sent == requests[client->request].size) watch(client->fd, client, EPOLLIN, EPOLL_CTL_MOD);
            }
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) pull(client);
        }
    }
    puts("end");
    fflush(stdout);
    uint64_t events_total = events_seen + in_flight_blocks(clients, connections) - before;
    printf("{\"seconds\":%.6f,\"requests\":%llu,\"events\":%llu,\"bytes\":%llu,\"refused\":%llu,\"broken\":%llu,"
           "\"reconnects\":%llu,\"fewest_events\":%llu,\"most_events\":%llu,\"replies_ever\":%llu,", (double)(now - began) / 1e9,
           (unsigned long long)done, (unsigned long long)events_total, (unsigned long long)bytes_in, (unsigned long long)refused,
           (unsigned long long)broken, (unsigned long long)reconnects, (unsigned long long)(done ? fewest : 0), (unsigned long long)most,
           (unsigned long long)replies_ever);
    print_histogram("latency", &latency);
    printf(",");
    print_histogram("first_byte", &first_byte);
    printf("}\n");
}

int main(int count, char **words) {
    if (count != 7) { fputs("usage: load PORT CONNECTIONS WARMUP_S SECONDS SPREAD_MS FILE\n", stderr); return 2; }
    if ((poller = epoll_create1(0)) < 0) die("epoll");
    target = atoi(words[1]);
    load_requests(words[6]);
    run_load(atoi(words[2]), atof(words[3]), atof(words[4]), atof(words[5]));
    return 0;
}
