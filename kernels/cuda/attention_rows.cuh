// The rows of a block of attention_prefill: which of them belong together, and how their keys and values get to shared memory.
#pragma once

#include "attention.cuh"
#include "bulk.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int MT = TILE_M / (16 * WARPS);  // tiles of 16 query rows a warp
constexpr int TOKENS = TILE_M / GROUP;     // rows of the batch that a block covers
constexpr int KEYS = E <= 64 ? 64 : 32;    // tokens of the cache at a time, as many as there are registers for
constexpr int PITCH = E * 2 + 16;          // bytes of a row in shared memory: neighbours start in different banks
constexpr int PIECES = E / 8;              // of 16 bytes in a row
constexpr int STAGE = 2 * KEYS * PITCH;    // bytes of keys and values
constexpr int ENTRIES = KEYS / BLOCK_TOKENS > 1 ? KEYS / BLOCK_TOKENS : 1;  // of the block table, for KEYS tokens
static_assert(TILE_M % (16 * WARPS) == 0 && (KEYS % BLOCK_TOKENS == 0 || BLOCK_TOKENS % KEYS == 0));

// What a block knows of its rows, in shared memory.
struct TileRows {
    int slot[TOKENS];
    int position[TOKENS];
};
// Neighbouring rows of one slot: tokens begin .. end - 1 of the tile; the lowest and the highest position.
struct Run {
    int begin, end, slot, low, high;
};

// The first run from `from` on; begin is TOKENS when there is none.
inline __device__ Run next_run(const TileRows& rows, int from) {
    const int lane = threadIdx.x % WARP;
    Run run = {TOKENS, TOKENS, PAD, 0x7fffffff, -1};
    for (int i = 0; i < TOKENS; i += WARP) {
        const int t = i + lane;
        const int slot = t >= from && t < TOKENS ? rows.slot[t] : PAD;
        if (run.begin == TOKENS) {
            const u32 live = __ballot_sync(ALL_LANES, slot != PAD);
            if (live == 0) continue;
            run.begin = i + __ffs(live) - 1;
            run.slot = rows.slot[run.begin];
        }
        const u32 others = __ballot_sync(ALL_LANES, t > run.begin && t < TOKENS && slot != run.slot);
        if (others != 0) run.end = i + __ffs(others) - 1;
        if (t >= run.begin && t < run.end) {
            run.low = min(run.low, rows.position[t]);
            run.high = max(run.high, rows.position[t]);
        }
        if (others != 0) break;
    }
    run.low = __reduce_min_sync(ALL_LANES, run.low);
    run.high = __reduce_max_sync(ALL_LANES, run.high);
    return run;
}

// The tokens that the row with most of them sees.
inline __device__ int longest(const TileRows& rows) {
    int most = 0;
    for (int t = threadIdx.x % WARP; t < TOKENS; t += WARP)
        if (rows.slot[t] != PAD) most = max(most, rows.position[t] + 1);
    return __reduce_max_sync(ALL_LANES, most);
}

// Copies tiles of KEYS tokens of one head. The block table is read a tile ahead.
struct KeyLoader {
    const Pages& pages;
    const int* table;  // of the run's slot
    int last;          // the last token that exists
    int head;
    int entry[ENTRIES];

    inline __device__ void look_up(int tile) {
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) entry[i] = table[min(tile * KEYS + i * BLOCK_TOKENS, last) / BLOCK_TOKENS];
    }
    // Keys, and after them values, of the tile that was looked up.
    inline __device__ void copy(char* stage, int tile) const {
        const char* base[ENTRIES];
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) base[i] = pages.key(entry[i], head, ENTRIES == 1 ? tile * KEYS % BLOCK_TOKENS : 0);
#pragma unroll
        for (int i = 0; i < (KEYS * PIECES + THREADS - 1) / THREADS; ++i) {
            const int at = threadIdx.x + i * THREADS, token = at / PIECES, piece = at % PIECES;
            if (KEYS * PIECES % THREADS != 0 && at >= KEYS * PIECES) break;
            const char* from = base[0];
#pragma unroll
            for (int j = 1; j < ENTRIES; ++j)
                if (token >= j * BLOCK_TOKENS) from = base[j];
            from += token % (KEYS / ENTRIES) * (E * 2) + piece * 16;
            char* to = stage + token * PITCH + piece * 16;
            const bool live = tile * KEYS + token <= last;
            copy_async<16>(to, from, live);
            copy_async<16>(to + KEYS * PITCH, from + pages.values, live);
        }
        cp_async_commit();
    }
};
