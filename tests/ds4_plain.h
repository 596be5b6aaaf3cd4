/* ds4.c with its plain kernels only, for tests of other things: it compiles in a third of the time. The system's headers come
 * first, for they need to know the processor. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#undef __x86_64__
#undef __aarch64__
#include "../ds4.c"
