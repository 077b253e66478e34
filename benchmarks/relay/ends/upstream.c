/* upstream PORT MODEL [ADAPTER...]: a fake vLLM 0.32 that answers in fixed time. Prints its port
 * (PORT 0: a free one). Any GET is answered with the list of models.
 *
 * The request says how it is answered, because proxies pass bodies and not headers: `max_tokens` is
 * the number of events of a stream, `seed` the microseconds between two of them, and
 * `return_token_ids` and `logprobs` ask for a bigger reply, as they do of the real one. `model` is
 * echoed. These members are looked for in the first and the last 1024 bytes of the body, so that a
 * long prompt costs nothing but its receipt. The shapes are those of tests/sidecar/recorded.
 */
#include "ends.h"

enum { MAX_STREAMS = 4096, MARGIN = 1024, TOKENS = 8, REPLY_TOKENS = 48 };
enum { LOGPROBS = 1, TOKEN_IDS = 2, STREAM = 4 };
enum { MAX_PROMPT_IDS = 400000, KEPT_REPLIES = 256 };

typedef struct { char *at; size_t size, room; } Text;
static void reserve(Text *text, size_t more) {
    if (text->size + more <= text->room) return;
    while (text->size + more > text->room) text->room = text->room ? text->room * 2 : 16384;
    if (!(text->at = realloc(text->at, text->room))) die("realloc");
}
static void put(Text *text, const char *format, ...) {
    va_list values, again;
    va_start(values, format);
    va_copy(again, values);
    int size = vsnprintf(NULL, 0, format, values);
    reserve(text, (size_t)size + 1);
    vsnprintf(text->at + text->size, (size_t)size + 1, format, again);
    text->size += (size_t)size;
    va_end(values);
    va_end(again);
}

/* ---- upstream: what it answers ---- */

typedef struct {
    char model[128];
    int flags, prompt_ids;
    Text whole;          /* a small reply, or the head and first event of a stream */
    Text event[TOKENS];  /* events of a stream, each an HTTP chunk */
    Text last;           /* the last event, [DONE] and the last chunk */
} Reply;

static const char *WORDS[TOKENS] = {" the", " a", " relay", " that", " costs", " next", " to", " no"};
static Reply kept[KEPT_REPLIES];

static void put_ids(Text *text, int count) {
    put(text, "[");
    for (int i = 0; i < count; i++) put(text, i ? ",%d" : "%d", 10007 + i * 7919 % 38000);
    put(text, "]");
}
static void put_logprobs(Text *text, int from, int count) {
    put(text, "{\"content\":[");
    for (int i = from; i < from + count; i++) {
        const char *word = WORDS[i % TOKENS];
        put(text, "%s{\"token\":\"%s\",\"logprob\":-%d.%lld,\"bytes\":[", i > from ? "," : "", word,
            i % 3, 30890738426208496ll + i % 48 * 1000000000000003ll);
        for (const char *c = word; *c; c++) put(text, c > word ? ",%d" : "%d", *c);
        put(text, "],\"top_logprobs\":[]}");
    }
    put(text, "]}");
}
static void put_chunk(Text *out, const Text *data) { put(out, "%zx\r\n%.*s\r\n", data->size, (int)data->size, data->at); }
static void put_event(Text *out, const Reply *reply, int index, int last) {
    Text data = {0};
    put(&data, "data: {\"id\":\"chatcmpl-0000000000000000\",\"object\":\"chat.completion.chunk\","
        "\"created\":1795233501,\"model\":\"%s\",\"choices\":[{\"index\":0,\"delta\":", reply->model);
    put(&data, index < 0 ? "{\"role\":\"assistant\",\"content\":\"\"}" : "{\"content\":\"%s\"}", WORDS[(index + TOKENS) % TOKENS]);
    put(&data, ",\"logprobs\":");
    if (index >= 0 && reply->flags & LOGPROBS) put_logprobs(&data, index, 1);
    else put(&data, "null");
    put(&data, ",\"finish_reason\":%s", last ? "\"length\",\"stop_reason\":null" : "null");
    if (index >= 0 && reply->flags & TOKEN_IDS) put(&data, ",\"token_ids\":[%d]}]", 10007 + index * 7919);
    else put(&data, index >= 0 ? ",\"token_ids\":null}]" : "}]");
    if (index < 0) {
        put(&data, ",\"prompt_token_ids\":");
        if (reply->flags & TOKEN_IDS) put_ids(&data, reply->prompt_ids);
        else put(&data, "null");
        put(&data, ",\"prompt_text\":null");
    }
    put(&data, last ? ",\"system_fingerprint\":\"vllm-0.32.0-2bf373ff\"}\n\n" : "}\n\n");
    put_chunk(out, &data);
    free(data.at);
}
static void build_stream(Reply *reply) {
    Text done = {0};
    put(&reply->whole, "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 03:57:56 GMT\r\nserver: uvicorn\r\n"
        "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n");
    put_event(&reply->whole, reply, -1, 0);
    for (int i = 0; i < TOKENS; i++) put_event(&reply->event[i], reply, i, 0);
    put_event(&reply->last, reply, 0, 1);
    put(&done, "data: [DONE]\n\n");
    put_chunk(&reply->last, &done);
    put(&reply->last, "0\r\n\r\n");
    free(done.at);
}
static void build_whole(Reply *reply) {
    Text body = {0};
    put(&body, "{\"id\":\"chatcmpl-0000000000000000\",\"object\":\"chat.completion\",\"created\":1795233501,"
        "\"model\":\"%s\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"", reply->model);
    for (int i = 0; i < REPLY_TOKENS; i++) put(&body, "%s", WORDS[i % TOKENS]);
    put(&body, "\",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,"
        "\"reasoning\":null},\"logprobs\":");
    if (reply->flags & LOGPROBS) put_logprobs(&body, 0, REPLY_TOKENS);
    else put(&body, "null");
    put(&body, ",\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":");
    if (reply->flags & TOKEN_IDS) put_ids(&body, REPLY_TOKENS);
    else put(&body, "null");
    put(&body, ",\"routed_experts\":null}],\"service_tier\":null,\"system_fingerprint\":\"vllm-0.32.0-2bf373ff\","
        "\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d,"
        "\"prompt_tokens_details\":null,\"completion_tokens_details\":null},\"prompt_logprobs\":null,"
        "\"prompt_token_ids\":", reply->prompt_ids, reply->prompt_ids + REPLY_TOKENS, REPLY_TOKENS);
    if (reply->flags & TOKEN_IDS) put_ids(&body, reply->prompt_ids);
    else put(&body, "null");
    put(&body, ",\"prompt_text\":null,\"kv_transfer_params\":null,\"ec_transfer_params\":null,\"metrics\":null}");
    put(&reply->whole, "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 03:57:56 GMT\r\nserver: uvicorn\r\n"
        "content-length: %zu\r\ncontent-type: application/json\r\n\r\n%.*s", body.size, (int)body.size, body.at);
    free(body.at);
}
static Reply *reply_for(const char *model, int flags, int prompt_ids) {
    static int next;
    for (int i = 0; i < KEPT_REPLIES; i++)
        if (kept[i].flags == flags && kept[i].prompt_ids == prompt_ids && !strcmp(kept[i].model, model)) return &kept[i];
    Reply *reply = &kept[next++];  /* never thrown away: a stream may be in the middle of it */
    if (next == KEPT_REPLIES) errno = ENOSPC, die("more kinds of replies than are kept");
    snprintf(reply->model, sizeof reply->model, "%s", model);
    reply->flags = flags;
    reply->prompt_ids = prompt_ids;
    if (flags & STREAM) build_stream(reply);
    else build_whole(reply);
    return reply;
}

/* ---- upstream: its connections ---- */

typedef struct {
    int fd;
    Text in;
    size_t head, needed;  /* bytes of the request's head, and of all of it; 0: not known yet */
    const char *out;
    size_t left;
    Reply *stream;        /* NULL: none runs */
    int sent, events;
    uint64_t due, gap;
} Server;

static Text models;  /* the answer to any GET: /v1/models, /health and what else a proxy looks at */
static Server *streaming[MAX_STREAMS];
static int streams;

static const char *member(const char *at, size_t size, const char *name) {
    const char *found = memmem(at, size, name, strlen(name));
    if (!found) return NULL;
    for (found += strlen(name); found < at + size && (*found == ' ' || *found == ':'); found++) {}
    return found < at + size ? found : NULL;
}
static const char *value_of(const Server *server, const char *name) {
    const char *body = server->in.at + server->head, *found;
    size_t size = server->needed - server->head, near = size < MARGIN ? size : MARGIN;
    if ((found = member(body, near, name))) return found;
    return size > near ? member(body + size - near, near, name) : NULL;
}
static long number_of(const Server *server, const char *name, long otherwise) {
    const char *found = value_of(server, name);
    return found && *found >= '0' && *found <= '9' ? strtol(found, NULL, 10) : otherwise;
}
static int is_true(const Server *server, const char *name) {
    const char *found = value_of(server, name);
    return found && !strncmp(found, "true", 4);
}
static void end_stream(Server *server) {
    for (int i = 0; i < streams; i++)
        if (streaming[i] == server) { streaming[i] = streaming[--streams]; break; }
    server->stream = NULL;
}
static void hang_up(Server *server) {
    end_stream(server);
    close(server->fd);
    free(server->in.at);
    free(server);
}
static int flush(Server *server) {  /* -1: the connection is gone, and so is `server` */
    while (server->left) {
        ssize_t sent = send(server->fd, server->out, server->left, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) { watch(server->fd, server, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD); return 0; }
        if (sent < 0) { hang_up(server); return -1; }
        server->out += sent;
        server->left -= (size_t)sent;
        if (!server->left) watch(server->fd, server, EPOLLIN, EPOLL_CTL_MOD);
    }
    return 0;
}
static int say(Server *server, const char *text, size_t size) {
    ssize_t sent = send(server->fd, text, size, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) { hang_up(server); return -1; }
    if (sent == (ssize_t)size) return 0;
    server->out = text + (sent > 0 ? sent : 0);
    server->left = size - (size_t)(sent > 0 ? sent : 0);
    return flush(server);
}
static int answer(Server *server) {
    if (strncmp(server->in.at, "POST", 4)) return say(server, models.at, models.size);
    char model[128] = "";
    const char *named = value_of(server, "\"model\"");
    if (named && *named == '"') snprintf(model, sizeof model, "%.*s", (int)strcspn(named + 1, "\""), named + 1);
    int flags = (is_true(server, "\"logprobs\"") ? LOGPROBS : 0) | (is_true(server, "\"return_token_ids\"") ? TOKEN_IDS : 0);
    if (is_true(server, "\"stream\"")) flags |= STREAM;
    int ids = 16 + (int)((server->needed - server->head) / 4096) * 1024;  /* about 4 bytes a token, in steps */
    Reply *reply = reply_for(model, flags, ids < MAX_PROMPT_IDS ? ids : MAX_PROMPT_IDS);
    if (flags & STREAM) {
        server->stream = reply;
        server->sent = 0;
        server->events = (int)number_of(server, "\"max_tokens\"", 16);
        server->gap = (uint64_t)number_of(server, "\"seed\"", 1000) * 1000;
        server->due = now_ns();  /* vLLM sends the role and the first token in one turn of its loop */
        if (streams == MAX_STREAMS) errno = EMFILE, die("streams");
        streaming[streams++] = server;
    }
    return say(server, reply->whole.at, reply->whole.size);
}
static void build_models(char **names) {
    Text body = {0};
    put(&body, "{\"object\":\"list\",\"data\":[");
    for (char **name = names; *name; name++)
        put(&body, "%s{\"id\":\"%s\",\"object\":\"model\",\"created\":1795233501,\"owned_by\":\"vllm\","
            "\"root\":\"%s\",\"parent\":%s%s%s,\"max_model_len\":%s,\"permission\":[]}", name > names ? "," : "", *name, *name,
            name > names ? "\"" : "", name > names ? *names : "null", name > names ? "\"" : "", name > names ? "null" : "1048576");
    put(&body, "]}");
    put(&models, "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
        "content-length: %zu\r\n\r\n%.*s", body.size, (int)body.size, body.at);
    free(body.at);
}
static int measure_request(Server *server) {  /* 1: the whole request is there */
    if (!server->needed) {
        char *end = memmem(server->in.at, server->in.size, "\r\n\r\n", 4);
        if (!end) return 0;
        *end = 0;  /* so that the search for the header stays inside the head */
        char *length = strcasestr(server->in.at, "\r\ncontent-length:");
        if (strcasestr(server->in.at, "\r\ntransfer-encoding:")) errno = EPROTO, die("a chunked request body");
        *end = '\r';
        server->head = (size_t)(end - server->in.at) + 4;
        server->needed = server->head + (length ? strtoul(length + 17, NULL, 10) : 0);
        if (server->needed > server->in.size) reserve(&server->in, server->needed - server->in.size + 1);
    }
    return server->in.size >= server->needed;
}
static void read_request(Server *server) {
    for (;;) {
        reserve(&server->in, 4096);
        size_t room = server->in.room - server->in.size - 1;
        ssize_t got = recv(server->fd, server->in.at + server->in.size, room, 0);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) { hang_up(server); return; }
        server->in.size += (size_t)got;
        server->in.at[server->in.size] = 0;
        while (measure_request(server)) {
            if (answer(server)) return;
            size_t rest = server->in.size - server->needed;
            memmove(server->in.at, server->in.at + server->needed, rest);
            server->in.size = rest;
            server->head = server->needed = 0;
        }
        if ((size_t)got < room) return;
    }
}
static uint64_t send_due(uint64_t now) {  /* returns when the next event is due */
    uint64_t next = UINT64_MAX;
    for (int i = 0; i < streams; i++) {
        Server *server = streaming[i];
        if (server->due <= now) {
            Reply *reply = server->stream;
            if (server->left) { server->due = now + server->gap; continue; }  /* its reader is behind */
            Text *text = server->sent + 1 < server->events ? &reply->event[server->sent % TOKENS] : &reply->last;
            server->sent++;
            server->due += server->gap;
            if (text == &reply->last) { end_stream(server); i--; say(server, text->at, text->size); continue; }
            if (say(server, text->at, text->size)) { i--; continue; }
        }
        if (server->due < next) next = server->due;
    }
    return next;
}
static void run_upstream(int port) {
    struct sockaddr_in address = local(port);
    struct epoll_event events[EVENTS];
    socklen_t size = sizeof address;
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096)) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    watch(listener, &listener, EPOLLIN, EPOLL_CTL_ADD);
    watch(timer, &timer, EPOLLIN, EPOLL_CTL_ADD);
    for (;;) {
        if (streams) {
            uint64_t next = send_due(now_ns());
            struct itimerspec at = {.it_value = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)}};
            if (next != UINT64_MAX) timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
        }
        int count = epoll_wait(poller, events, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            void *who = events[i].data.ptr;
            if (who == &timer) { uint64_t ticks; if (read(timer, &ticks, sizeof ticks) < 0 && errno != EAGAIN) die("timer"); continue; }
            if (who == &listener) {
                int fd;
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    Server *server = calloc(1, sizeof *server);
                    server->fd = fd;
                    no_delay(fd);
                    watch(fd, server, EPOLLIN, EPOLL_CTL_ADD);
                }
                continue;
            }
            Server *server = who;
            if (events[i].events & EPOLLOUT && flush(server)) continue;
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_request(server);
        }
    }
}

int main(int count, char **words) {
    if (count < 3) { fputs("usage: upstream PORT MODEL [ADAPTER...]\n", stderr); return 2; }
    if ((poller = epoll_create1(0)) < 0) die("epoll");
    build_models(words + 2);
    run_upstream(atoi(words[1]));
}
