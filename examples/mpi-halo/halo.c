/* Heat on a ring of ranks: each has a strip of a square, and sends its edges to its neighbours. */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { WIDTH = 128, HEIGHT = 32 }; /* of a rank's strip; row 0 and row HEIGHT + 1 are the halo */

static double now[HEIGHT + 2][WIDTH], next[HEIGHT + 2][WIDTH];

static void exchange(int up, int down) {
    MPI_Sendrecv(now[1], WIDTH, MPI_DOUBLE, up, 0, now[HEIGHT + 1], WIDTH, MPI_DOUBLE, down, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Sendrecv(now[HEIGHT], WIDTH, MPI_DOUBLE, down, 1, now[0], WIDTH, MPI_DOUBLE, up, 1,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void step(void) {
    for (int y = 1; y <= HEIGHT; y++)
        for (int x = 0; x < WIDTH; x++)
            next[y][x] = (now[y - 1][x] + now[y + 1][x] + now[y][(x + 1) % WIDTH] +
                          now[y][(x + WIDTH - 1) % WIDTH]) / 4;
    for (int y = 1; y <= HEIGHT; y++)
        for (int x = 0; x < WIDTH; x++)
            now[y][x] = next[y][x];
}

int main(int argc, char **argv) {
    int rank, size, steps = argc > 1 ? atoi(argv[1]) : 200;
    char host[64] = "";
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    gethostname(host, sizeof host - 1);
    if (rank == 0)
        now[1][0] = 1e6; /* the heat is there, and stays on the ring */
    double begun = MPI_Wtime();
    for (int i = 0; i < steps; i++) {
        exchange((rank + size - 1) % size, (rank + 1) % size);
        step();
    }
    double seconds = MPI_Wtime() - begun, mine = 0, all = 0;
    for (int y = 1; y <= HEIGHT; y++)
        for (int x = 0; x < WIDTH; x++)
            mine += now[y][x];
    MPI_Reduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    printf("rank %d of %d on %s\n", rank, size, host);
    fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("heat %.3f after %d steps, %.3f ms each\n", all, steps, 1e3 * seconds / steps);
    MPI_Finalize();
    return fabs(all - 1e6) > 1 && rank == 0;
}
