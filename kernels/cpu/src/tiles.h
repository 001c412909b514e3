// The tile unit: whether this process may use it, and the shapes of its eight tiles.
#pragma once

#include "vec.h"

#ifdef LEFTFOLD_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lf {

#ifdef LEFTFOLD_AMX
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row, per tile
    uint8_t rows[16] = {};

    // All tiles 16 rows of 64 bytes.
    TileConfig() {
        for (int i = 0; i < 8; i++) bytes[i] = 64, rows[i] = 16;
    }

    // For attention of so many query vectors: 0 to 3 a row of 64 bytes for each; 4 a block of keys; 5 and 6 weights of 16
    // tokens for each; 7 values of 16 tokens.
    explicit TileConfig(int vectors) : TileConfig() {
        for (int i : {0, 1, 2, 3, 5, 6}) rows[i] = uint8_t(vectors);
        bytes[5] = bytes[6] = 16;
        rows[7] = 4;
    }
};

inline bool tiles_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
    return allowed;
}

// Compilers do not know what the tile instructions read and write: here all memory is as the source says.
inline void in_order() { asm volatile("" ::: "memory"); }

inline void tiles_set(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

inline void tiles_on() {
    static const TileConfig config;
    if (tiles_allowed()) tiles_set(config);
}

inline void tiles_off() {
    if (tiles_allowed()) _tile_release();
}
#else
inline bool tiles_allowed() { return false; }
inline void tiles_on() {}
inline void tiles_off() {}
#endif

}  // namespace lf
