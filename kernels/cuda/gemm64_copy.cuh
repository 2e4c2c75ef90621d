// The warp that copies: weights into the ring, and activations that do not stay.
//
// Copies are of 16 bytes a lane, not bulk: a slice of a row is 512 bytes or 1 KB, and the bulk engine takes too long over each piece to keep up with
// memory. A warp's copy is one such piece, its addresses constants beyond two registers.
#pragma once

#include "gemm64_parts.cuh"

struct Stage {
    int index, unit, part;
};

// Units come in groups of one for each warp; a group's stages go round the warps, part by part.
inline __device__ Stage stage_at(const Block& b, int q) {
    const int g = q / (WARPS * PARTS), rest = q % (WARPS * PARTS), active = b.mine - g * WARPS;
    const int warp = active < WARPS ? rest % active : rest % WARPS, part = active < WARPS ? rest / active : rest / WARPS;
    return {q, b.cluster + (g * WARPS + warp) * b.clusters, part};
}

// Calls f(row of the unit, where a piece of 8 columns lies in it, which piece) for this lane's share of a stage; lanes side by side take pieces
// side by side.
template <typename F>
inline __device__ void for_pieces(const Args& a, const Block& b, const Stage& at, int lane, F f) {
    const u16* half[2];
    int rows[2];  // that there are: a unit may end beyond the last
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const i64 first = weight_row(a, at.unit, h * HALF), there = (a.n + 7) / 8 * 8 - first;
        half[h] = a.w + first * K + slice_start(b.rank) + at.part * STAGE_K;
        rows[h] = there < 0 ? 0 : there < HALF ? int(there) : HALF;
    }
    if (EVEN && PIECES % WARP == 0 && rows[0] + rows[1] == UNIT) {  // addresses are constants beyond two registers
        constexpr int of_row = PIECES / WARP;
#pragma unroll
        for (int i = 0; i < UNIT * of_row; ++i) {
            const int row = i / of_row, piece = i % of_row * WARP;
            f(row, half[row / HALF] + 8 * lane + row % HALF * K + 8 * piece, piece + lane);
        }
    } else if (EVEN && WARP % PIECES == 0 && rows[0] + rows[1] == UNIT) {
        constexpr int at_once = WARP / PIECES;
#pragma unroll
        for (int i = 0; i < UNIT / at_once; ++i) {
            const int row = i * at_once + lane / PIECES;
            f(row, half[i * at_once / HALF] + row % HALF * K + 8 * (lane % PIECES), lane % PIECES);
        }
    } else {
        const int pieces = EVEN ? PIECES : b.columns(at.part) / 8;
#pragma unroll 2
        for (int i = lane; i < UNIT * pieces; i += WARP) {
            const int row = i / pieces, piece = i % pieces;
            const u16* first = row < HALF ? half[0] : half[1];
            if (row % HALF < (row < HALF ? rows[0] : rows[1])) f(row, first + row % HALF * K + 8 * piece, piece);
        }
    }
}

inline __device__ void copy_stage(const Args& a, const Block& b, const Stage& at, u64 policy, int lane) {
    const int slot = at.index % STAGES;
    char* to = b.stages + slot * STAGE_BYTES;
    for_pieces(a, b, at, lane, [&](int row, const u16* from, int piece) {
        cp_async16(to + row_offset<UNIT>(row) + piece * 16, from, policy);
    });
    cp_async_arrive(&b.s.full[slot]);
    if (lane == 0) store_volatile(&b.s.holds[slot], at.index);
}

// One part of the activations, by `threads` threads.
inline __device__ void copy_activations(const Args& a, const Block& b, int part, int slot, int thread, int threads) {
    const int pieces = EVEN ? PIECES : b.columns(part) / 8, first = slice_start(b.rank) + part * STAGE_K;
#pragma unroll 2
    for (int i = thread; i < a.rows * pieces; i += threads) {
        const int r = i / pieces, piece = i % pieces, k = first + piece * 8;
        const bool real = k < D;  // what is beyond is zero, there as here: what is not a number times zero is none
        cp_async16(b.acts + slot * ACT_BYTES + row_offset<ROWS>(r) + piece * 16,
                   static_cast<const u16*>(a.act) + i64(r) * D + (real ? k : 0), real ? 16 : 0);
    }
    cp_async_arrive(&b.s.act_full[slot]);
}

inline __device__ void produce(const Args& a, const Block& b, int lane) {
    const u64 policy = evict_first_policy();
    const int stages = b.mine * PARTS, uses = STREAMED ? (b.mine + WARPS - 1) / WARPS * PARTS : 0;
    int used = 0, q = 0;
    const auto stream_activations = [&](int until) {
        for (; used < min(until, uses); ++used) {
            const int slot = used % ACT_SLOTS;
            if (used >= ACT_SLOTS) barrier_wait(&b.s.act_empty[slot], (used / ACT_SLOTS - 1) & 1);
            copy_activations(a, b, used % PARTS, slot, lane, WARP);
        }
    };
    for (; q < min(STAGES, stages); ++q) copy_stage(a, b, stage_at(b, q), policy, lane);
    pdl_launch();
    for (int p = q; p < min(q + PREFETCH, stages); ++p) {
        for_pieces(a, b, stage_at(b, p), lane, [&](int, const u16* from, int piece) {
            if (piece % 8 == 0) prefetch_l2(from);  // a line
        });
    }
    pdl_wait();
    stream_activations(ACT_SLOTS);
    for (; q < stages; ++q) {
        const Stage at = stage_at(b, q);
        stream_activations(q / (WARPS * PARTS) * PARTS + at.part + 1);  // whoever is to empty a stage may need these first
        barrier_wait(&b.s.empty[q % STAGES], (q / STAGES - 1) & 1);
        copy_stage(a, b, at, policy, lane);
    }
    stream_activations(uses);
}
