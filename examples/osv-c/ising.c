/* Magnets on a square grid (Ising 1925), each guest half a degree warmer than the one before.

   Below 2.269 (Onsager 1944) they point one way and the mean is near 1, above it is near 0.
   Metropolis' algorithm; the seed is fixed: each run gives the same numbers. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { EDGE = 64 };

static signed char spin[EDGE][EDGE];
static uint64_t state = 88172645463325252ull;

static double chance(void) { /* xorshift64: Marsaglia 2003 */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) / 9007199254740992.0;
}

static void sweep(double temperature) {
    for (int i = 0; i < EDGE * EDGE; i++) {
        int x = (int)(chance() * EDGE), y = (int)(chance() * EDGE);
        int around = spin[y][(x + 1) % EDGE] + spin[y][(x + EDGE - 1) % EDGE] +
                     spin[(y + 1) % EDGE][x] + spin[(y + EDGE - 1) % EDGE][x];
        double cost = 2.0 * spin[y][x] * around;
        if (cost <= 0 || chance() < exp(-cost / temperature))
            spin[y][x] = -spin[y][x];
    }
}

int main(int argc, char **argv) {
    const char *rank = getenv("VTORQUE_RANK");
    double temperature = 2.0 + 0.5 * (rank ? atoi(rank) : 0), mean = 0;
    int sweeps = argc > 1 ? atoi(argv[1]) : 1000;
    for (int y = 0; y < EDGE; y++)
        for (int x = 0; x < EDGE; x++)
            spin[y][x] = 1;
    for (int i = 0; i < sweeps; i++) {
        int sum = 0;
        sweep(temperature);
        for (int y = 0; y < EDGE; y++)
            for (int x = 0; x < EDGE; x++)
                sum += spin[y][x];
        if (i >= sweeps / 2) /* the first half is to forget the beginning */
            mean += fabs((double)sum) / (EDGE * EDGE) / (sweeps - sweeps / 2);
    }
    printf("temperature %.1f: magnetisation %.3f\n", temperature, mean);
    return 0;
}
