/* A slower disk: every sync does its work and then takes SYNC_DELAY_US microseconds more.

   Loaded with LD_PRELOAD into every contender alike, so that all of them meet the same disk. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>

typedef int (*sync_function)(int);

static sync_function real_fsync, real_fdatasync;
static struct timespec delay;

__attribute__((constructor)) static void prepare(void) {
    const char *given = getenv("SYNC_DELAY_US");
    long delay_us = given ? atol(given) : 0;
    delay.tv_sec = delay_us / 1000000;
    delay.tv_nsec = (delay_us % 1000000) * 1000;
    real_fsync = (sync_function)dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = (sync_function)dlsym(RTLD_NEXT, "fdatasync");
}

static int slowly(sync_function sync, int descriptor) {
    int result = sync(descriptor);
    int kept = errno;
    struct timespec left = delay;
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
    errno = kept;
    return result;
}

int fsync(int descriptor) { return slowly(real_fsync, descriptor); }

int fdatasync(int descriptor) { return slowly(real_fdatasync, descriptor); }
