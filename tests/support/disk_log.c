/* Logs what a process does to the files of one folder, for LD_PRELOAD: writes with their data,
   truncations and syncs, in order. DISK_LOG names the log, DISK_LOG_UNDER the folder.
   An entry: kind (w, t or s), length of the path, offset, length of the data; path; data.
   SQLite's shared memory (-shm) is mapped, not written; it is made anew after a power cut. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct entry {
    uint64_t offset;
    uint32_t length;
    uint16_t path_length;
    char kind;
    char unused;
};

static int log_fd = -1;
static const char *folder;

static int wanted(int fd, char *path, size_t room) {
    char link[64];
    if (folder == NULL) {
        const char *name = getenv("DISK_LOG");
        folder = getenv("DISK_LOG_UNDER");
        if (name == NULL || folder == NULL) return 0;
        log_fd = open(name, O_CREAT | O_WRONLY | O_APPEND, 0600);
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, room - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

static void say(char kind, int fd, const void *data, uint32_t length, uint64_t offset) {
    char path[4096];
    if (!wanted(fd, path, sizeof path)) return;
    struct entry head = {offset, data == NULL ? 0 : length, (uint16_t)strlen(path), kind, 0};
    struct iovec parts[] = {
        {&head, sizeof head}, {path, head.path_length}, {(void *)data, head.length}};
    syscall(SYS_writev, log_fd, parts, 3);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) {
    ssize_t done = NEXT(pwrite)(fd, data, length, offset);
    if (done > 0) say('w', fd, data, (uint32_t)done, (uint64_t)offset);
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
    ssize_t done = NEXT(pwrite64)(fd, data, length, offset);
    if (done > 0) say('w', fd, data, (uint32_t)done, (uint64_t)offset);
    return done;
}

ssize_t write(int fd, const void *data, size_t length) {
    ssize_t done = NEXT(write)(fd, data, length);
    if (done > 0) say('w', fd, data, (uint32_t)done, (uint64_t)(lseek(fd, 0, SEEK_CUR) - done));
    return done;
}

int ftruncate(int fd, off_t length) {
    int failed = NEXT(ftruncate)(fd, length);
    if (!failed) say('t', fd, NULL, 0, (uint64_t)length);
    return failed;
}

int ftruncate64(int fd, off64_t length) {
    int failed = NEXT(ftruncate64)(fd, length);
    if (!failed) say('t', fd, NULL, 0, (uint64_t)length);
    return failed;
}

int fsync(int fd) {
    int failed = NEXT(fsync)(fd);
    if (!failed) say('s', fd, NULL, 0, 0);
    return failed;
}

int fdatasync(int fd) {
    int failed = NEXT(fdatasync)(fd);
    if (!failed) say('s', fd, NULL, 0, 0);
    return failed;
}
