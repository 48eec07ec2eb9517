/* Counts the calls of this process that change files below one folder, and breaks one of them.

   Built and preloaded by `hostile.sandbox`; idle until `fail_calls` arms it in a forked child. It stands before the
   functions of the C library, so it sees what Python, ctypes, FFmpeg, Arrow and C++ streams call. It does not see what
   the C library calls itself (`fopen` and `fwrite`), nor system calls that are made without it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { COUNT, KILL, EIO_ONCE, EIO_ON, ENOSPC_ON, EINTR_ONCE, SEND_INT, SEND_TERM };
enum trait { INTERRUPTIBLE = 1, NEEDS_SPACE = 2 };

static int log_fd = -1;
static char folder[PATH_MAX];
static enum kind kind;
static long first;
static atomic_long calls, broken;
static pid_t owner;
static void (*at_first_call)(void);

/* Arms this process. `log` is a file that gets a line for each call; that of the first one that is broken begins
   with an exclamation mark. */
int fail_calls(const char *below, const char *log, int how, long number) {
    int fd = open(log, O_WRONLY | O_APPEND);
    if (fd < 0 || !realpath(below, folder))
        return -1;
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 200);
    close(fd);
    kind = how, first = number, owner = getpid();
    return log_fd < 0 ? -1 : 0;
}

/* Has this process call `callback` before its first call is counted; that may fork, and arm what it forks. */
int hold_calls(const char *below, void (*callback)(void)) {
    at_first_call = callback, owner = getpid();
    return realpath(below, folder) ? 0 : -1;
}

static int is_below(const char *path) {
    size_t length = strlen(folder);
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int name_of(int fd, char *name) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, PATH_MAX - 1);
    name[length < 0 ? 0 : length] = 0;
    return length > 0;
}

/* Returns whether a path, of a folder that is open or of the working folder, is below the watched one. */
static int is_path_below(int at, const char *path) {
    char whole[2 * PATH_MAX];
    if (!path)
        return 0;
    if (path[0] == '/')
        return is_below(path);
    if (at == AT_FDCWD ? !getcwd(whole, PATH_MAX) : !name_of(at, whole))
        return 0;
    return is_below(whole);
}

/* Counts a call, and returns 1 where it is to fail, with `errno` set, or 2 where the process is to die. */
static int is_broken(const char *call, const char *path, int traits) {
    if (at_first_call) {
        void (*callback)(void) = at_first_call;
        at_first_call = NULL;
        callback();
    }
    int before = errno;
    long number = ++calls;
    int error = kind == ENOSPC_ON ? ENOSPC : kind == EINTR_ONCE ? EINTR : EIO;
    int goes_on = kind == EIO_ON || kind == ENOSPC_ON;
    int breaks = kind != COUNT && (number == first || (number > first && goes_on));
    if ((error == EINTR && !(traits & INTERRUPTIBLE)) || (error == ENOSPC && !(traits & NEEDS_SPACE)))
        breaks = 0;
    dprintf(log_fd, "%s%s %s\n", breaks && !broken++ ? "!" : "", call, path);
    if (breaks && kind >= SEND_INT) { /* asked to end, while the call succeeds */
        kill(getpid(), kind == SEND_INT ? SIGINT : SIGTERM);
        breaks = 0;
    }
    errno = breaks && kind != KILL ? error : before;
    return !breaks ? 0 : kind == KILL ? 2 : 1;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static int is_armed(void) { return (log_fd >= 0 || at_first_call) && owner == getpid(); }

static int breaks_path(const char *call, int at, const char *path, int traits) {
    if (!is_armed() || !is_path_below(at, path))
        return 0;
    int broken = is_broken(call, path, traits);
    if (broken == 2)
        die();
    return broken;
}

static int breaks_file(const char *call, int fd, int traits) {
    char name[PATH_MAX];
    int before = errno;
    if (!is_armed() || !name_of(fd, name) || !is_below(name)) {
        errno = before;
        return 0;
    }
    return is_broken(call, name, traits);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OF_FILE(result, name, parameters, arguments, fd, traits)                                                       \
    result name parameters {                                                                                           \
        switch (breaks_file(#name, fd, traits)) {                                                                      \
        case 1:                                                                                                        \
            return -1;                                                                                                 \
        case 2:                                                                                                        \
            die();                                                                                                     \
        }                                                                                                              \
        return REAL(name) arguments;                                                                                   \
    }

/* A process that dies while it writes has written the first half. */
#define OF_WRITE(result, name, parameters, arguments, half)                                                            \
    result name parameters {                                                                                           \
        switch (breaks_file(#name, fd, INTERRUPTIBLE | NEEDS_SPACE)) {                                                 \
        case 1:                                                                                                        \
            return -1;                                                                                                 \
        case 2:                                                                                                        \
            (void)!REAL(name) half;                                                                                    \
            die();                                                                                                     \
        }                                                                                                              \
        return REAL(name) arguments;                                                                                   \
    }

#define OF_PATH(result, name, parameters, arguments, at, path, traits)                                                 \
    result name parameters {                                                                                           \
        if (breaks_path(#name, at, path, traits))                                                                      \
            return -1;                                                                                                 \
        return REAL(name) arguments;                                                                                   \
    }

OF_WRITE(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), (fd, data, size / 2))
OF_WRITE(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at),
         (fd, data, size / 2, at))
OF_WRITE(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at),
         (fd, data, size / 2, at))
OF_WRITE(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), (fd, parts, count / 2))
OF_WRITE(ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at),
         (fd, parts, count / 2, at))
OF_WRITE(ssize_t, pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at),
         (fd, parts, count / 2, at))
OF_FILE(int, fsync, (int fd), (fd), fd, INTERRUPTIBLE | NEEDS_SPACE)
OF_FILE(int, fdatasync, (int fd), (fd), fd, INTERRUPTIBLE | NEEDS_SPACE)
OF_FILE(int, ftruncate, (int fd, off_t size), (fd, size), fd, INTERRUPTIBLE | NEEDS_SPACE)
OF_FILE(int, ftruncate64, (int fd, off64_t size), (fd, size), fd, INTERRUPTIBLE | NEEDS_SPACE)
OF_FILE(ssize_t, sendfile, (int out, int in, off_t *at, size_t size), (out, in, at, size), out,
        INTERRUPTIBLE | NEEDS_SPACE)
OF_FILE(ssize_t, sendfile64, (int out, int in, off64_t *at, size_t size), (out, in, at, size), out,
        INTERRUPTIBLE | NEEDS_SPACE)
OF_PATH(int, truncate, (const char *path, off_t size), (path, size), AT_FDCWD, path, INTERRUPTIBLE | NEEDS_SPACE)
OF_PATH(int, truncate64, (const char *path, off64_t size), (path, size), AT_FDCWD, path, INTERRUPTIBLE | NEEDS_SPACE)
OF_PATH(int, rename, (const char *old, const char *new), (old, new), AT_FDCWD, new, NEEDS_SPACE)
OF_PATH(int, renameat, (int from, const char *old, int to, const char *new), (from, old, to, new), to, new,
        NEEDS_SPACE)
OF_PATH(int, renameat2, (int from, const char *old, int to, const char *new, unsigned flags),
        (from, old, to, new, flags), to, new, NEEDS_SPACE)
OF_PATH(int, link, (const char *old, const char *new), (old, new), AT_FDCWD, new, NEEDS_SPACE)
OF_PATH(int, linkat, (int from, const char *old, int to, const char *new, int flags), (from, old, to, new, flags), to,
        new, NEEDS_SPACE)
OF_PATH(int, symlink, (const char *old, const char *new), (old, new), AT_FDCWD, new, NEEDS_SPACE)
OF_PATH(int, unlink, (const char *path), (path), AT_FDCWD, path, 0)
OF_PATH(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), at, path, 0)
OF_PATH(int, rmdir, (const char *path), (path), AT_FDCWD, path, 0)
OF_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, NEEDS_SPACE)
OF_PATH(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), at, path, NEEDS_SPACE)

#define OF_OPEN(name, parameters, arguments, at)                                                                       \
    int name parameters {                                                                                              \
        int creates = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;                                             \
        mode_t mode = 0;                                                                                               \
        if (creates) {                                                                                                 \
            va_list more;                                                                                              \
            va_start(more, flags);                                                                                     \
            mode = va_arg(more, mode_t);                                                                               \
            va_end(more);                                                                                              \
        }                                                                                                              \
        if (creates && breaks_path(#name, at, path, INTERRUPTIBLE | NEEDS_SPACE))                                      \
            return -1;                                                                                                 \
        return REAL(name) arguments;                                                                                   \
    }

OF_OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OF_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OF_OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
OF_OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
