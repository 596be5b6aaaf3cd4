/* Tile registers in C, for a build of hooks.c whose AMX kernels run where the processor has AVX-512 but no AMX (Intel 64 and IA-32
 * Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBSSD, TDPBSUD). Sizes that do
 * not fit one another end the program, as they would fault. */
#ifndef TILES_H
#define TILES_H
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TILES = 8, TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

typedef struct {
    uint16_t bytes;
    uint8_t rows;
    uint8_t v[TILE_ROWS][TILE_ROW_BYTES];
} tile_register;

static _Thread_local tile_register tile_registers[TILES];

static inline void tiles_need(bool ok) {
    if (!ok) abort();
}

static inline void tiles_configure(const void *config) {
    const uint8_t *c = config;
    tiles_need(c[0] == 1);
    for (int i = 0; i < TILES; i++) {
        tile_register *t = &tile_registers[i];
        memset(t, 0, sizeof *t);
        memcpy(&t->bytes, c + 16 + 2 * i, 2);
        t->rows = c[48 + i];
        tiles_need(t->rows && t->rows <= TILE_ROWS && t->bytes && t->bytes <= TILE_ROW_BYTES);
    }
}

static inline void tiles_zero(int to) { memset(tile_registers[to].v, 0, sizeof tile_registers[to].v); }

static inline void tiles_load(int to, const void *from, size_t step) {
    tile_register *t = &tile_registers[to];
    tiles_need(t->rows);
    tiles_zero(to);
    for (int r = 0; r < t->rows; r++) memcpy(t->v[r], (const uint8_t *)from + (size_t)r * step, t->bytes);
}

static inline void tiles_store(int from, void *to, size_t step) {
    const tile_register *t = &tile_registers[from];
    tiles_need(t->rows);
    for (int r = 0; r < t->rows; r++) memcpy((uint8_t *)to + (size_t)r * step, t->v[r], t->bytes);
}

/* c (m, n) += a (m, 4 k) b (k, 4 n): sums of four products of signed bytes of a and bytes of b, signed or not. */
static inline void tiles_dot(bool b_signed, int to, int first, int second) {
    tile_register *c = &tile_registers[to];
    const tile_register *a = &tile_registers[first], *b = &tile_registers[second];
    tiles_need(c->rows && a->rows == c->rows && b->bytes == c->bytes && b->rows == a->bytes / 4);
    for (int m = 0; m < c->rows; m++)
        for (int k = 0; k < b->rows; k++)
            for (int n = 0; n < c->bytes / 4; n++) {
                uint32_t sum;
                memcpy(&sum, &c->v[m][4 * n], 4);
                for (int i = 0; i < 4; i++) {
                    const uint8_t y = b->v[k][4 * n + i];
                    sum += (uint32_t)((int8_t)a->v[m][4 * k + i] * (b_signed ? (int8_t)y : y));
                }
                memcpy(&c->v[m][4 * n], &sum, 4);
            }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_release
#undef _tile_dpbssd
#undef _tile_dpbsud
#define LOAD_TILE_SETTINGS(config) tiles_configure(&(config))
#define _tile_zero(to) tiles_zero(to)
#define _tile_loadd(to, from, step) tiles_load(to, from, step)
#define _tile_stored(from, to, step) tiles_store(from, to, step)
#define _tile_release() memset(tile_registers, 0, sizeof tile_registers)
#define _tile_dpbssd(to, a, b) tiles_dot(true, to, a, b)
#define _tile_dpbsud(to, a, b) tiles_dot(false, to, a, b)
#endif
