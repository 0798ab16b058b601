/* Writes standard input into memory of a device, or the memory to standard output: what neither
 * busybox nor a shell can do, since the kernel lets these files only be mapped (mmap(2)).
 *
 *   shmem write|read FILE
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct stat status;
    int in, fd;
    char *memory;
    size_t done = 0, size;
    ssize_t part;

    if (argc != 3) {
        fprintf(stderr, "usage: shmem write|read FILE\n");
        return 2;
    }
    in = strcmp(argv[1], "write") == 0;
    fd = open(argv[2], O_RDWR);
    if (fd < 0 || fstat(fd, &status) != 0) {
        fprintf(stderr, "%s: %s\n", argv[2], strerror(errno));
        return 1;
    }
    size = (size_t)status.st_size;
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        fprintf(stderr, "mmap: %s\n", strerror(errno));
        return 1;
    }
    while (done < size) {
        /* Not read(2) into a device's memory, nor write(2) out of it: those need pages of RAM. */
        static char buffer[1 << 16];
        size_t want = size - done < sizeof buffer ? size - done : sizeof buffer;

        if (in) {
            part = read(0, buffer, want);
            if (part > 0)
                memcpy(memory + done, buffer, (size_t)part);
        } else {
            memcpy(buffer, memory + done, want);
            part = write(1, buffer, want);
        }
        if (part <= 0)
            break;
        done += (size_t)part;
    }
    if (done != size)
        fprintf(stderr, "%zu of %zu bytes\n", done, size);
    return done == size ? 0 : 1;
}
