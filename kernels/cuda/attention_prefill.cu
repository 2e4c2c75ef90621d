// out[R, H, E] = softmax(q · kᵀ · scale) · v over the paged cache for many rows: a row sees tokens 0 .. its own of its slot.
//
// Bound by the flops of the two products. The trick: the query heads that share a key head are rows of one tile, so a tile covers few tokens and
// little of what it computes is masked; and a tile walks the keys of every run of rows of one slot by itself, so that any mix of prompts is one
// launch.
//
// Flash attention (arXiv 2307.08691): a warp owns 16 · MT query rows, scores never leave registers, and the next keys and values arrive
// meanwhile.
#include "attention_tile.cuh"

// Where blocks meet that share the keys of one tile.
struct Part {
    float o[TILE_M][E];
    float2 stats[TILE_M];  // maximum, in units of the exponent, and sum
};

inline __device__ void store_part(Part& part, const Softmax& f, float scale) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = (warp * MT + m) * 16 + h * 8 + lane / 4;
            const float sum = quad_sum(f.sum[m][h]);
            if (lane % 4 == 0) part.stats[row] = make_float2(f.top[m][h] == NEVER ? NEVER : f.top[m][h] * scale, sum);
#pragma unroll
            for (int n = 0; n < E / 8; ++n)
                *reinterpret_cast<float2*>(&part.o[row][n * 8 + lane % 4 * 2]) =
                    make_float2(f.o[m][n][2 * h], f.o[m][n][2 * h + 1]);
        }
}

// out: of the tile's first row and this head. stride: values from one row of the batch to the next.
inline __device__ void combine(const Part* parts, int shares, u16* out, i64 stride, int count) {
    for (int i = threadIdx.x; i < TILE_M * E / 4; i += THREADS) {
        const int row = i / (E / 4), column = i % (E / 4) * 4;
        if (row / GROUP >= count) return;
        float top = NEVER, sum = 0;
        float4 v = make_float4(0, 0, 0, 0);
        for (int s = 0; s < shares; ++s) {
            const float2 stat = load_fresh(&parts[s].stats[row]);
            const float4 o = load_fresh(reinterpret_cast<const float4*>(&parts[s].o[row][column]));
            if (stat.x == NEVER) continue;
            const float high = fmaxf(top, stat.x), less = exp2_fast(top - high), more = exp2_fast(stat.x - high);
            top = high, sum = sum * less + stat.y * more;
            v = make_float4(v.x * less + o.x * more, v.y * less + o.y * more, v.z * less + o.z * more, v.w * less + o.w * more);
        }
        const float r = sum > 0 ? 1.0f / sum : 0.0f;  // a padding row has seen nothing
        *reinterpret_cast<uint2*>(out + row / GROUP * stride + row % GROUP * E + column) =
            make_uint2(pack_bf16(v.x * r, v.y * r), pack_bf16(v.z * r, v.w * r));
    }
}

// By way of the queries' place, whose rows only this warp reads, to whole rows.
inline __device__ void store(char* my_q, const Softmax& f, u16* out, i64 stride, int count) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = quad_sum(f.sum[m][h]);
            const float r = sum > 0 ? 1.0f / sum : 0.0f;  // a padding row has seen nothing
            char* to = my_q + (m * 16 + h * 8 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
            for (int n = 0; n < E / 8; ++n)
                *reinterpret_cast<u32*>(to + n * 16) = pack_bf16(f.o[m][n][2 * h] * r, f.o[m][n][2 * h + 1] * r);
        }
    __syncwarp();
    for (int i = lane; i < MT * 16 * PIECES; i += WARP) {
        const int m = i / PIECES, piece = i % PIECES, row = warp * MT * 16 + m, token = row / GROUP;
        if (token >= count) break;
        *reinterpret_cast<uint4*>(out + token * stride + row % GROUP * E + piece * 8) =
            *reinterpret_cast<const uint4*>(my_q + m * PITCH + piece * 16);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_prefill(const u16* q, const u16* cache, const int* block_table, const int* row_slot, const int* positions, u16* out,
                      u32* arrivals, Part* partials, i64 block_bytes, i64 value_bytes, int rows_, int kv_heads, int max_blocks,
                      int share_tokens, float scale) {
    extern __shared__ __align__(128) char smem[];
    char* const q_tile = smem;
    char* const stages = smem + TILE_M * PITCH;
    TileRows& rows = *reinterpret_cast<TileRows*>(stages + 2 * STAGE);
    const Pages pages = {reinterpret_cast<const char*>(cache), block_bytes, value_bytes};
    const int warp = threadIdx.x / WARP;
    const int tile_index = gridDim.x / kv_heads - 1 - blockIdx.x / kv_heads;  // late rows see most: they begin first
    const int head = blockIdx.x % kv_heads, first = tile_index * TOKENS, count = min(rows_ - first, TOKENS);
    const i64 stride = i64(kv_heads) * (GROUP * E), origin = first * stride + head * (GROUP * E);

    pdl_begin();
    pdl_launch();
    pdl_wait();
    for (int t = threadIdx.x; t < TOKENS; t += THREADS) {
        rows.slot[t] = t < count ? row_slot[first + t] : PAD;
        rows.position[t] = t < count ? positions[first + t] : 0;
    }
    __syncthreads();
    // Where there are few tiles, several blocks share the keys of one, if these are many.
    const int shares = min(ceil_div(max(longest(rows), 1), share_tokens), int(gridDim.y)), share = blockIdx.y;
    if (share >= shares) return;
    // Row m of the tile is head m % GROUP of the group, of token m / GROUP.
    for (int i = threadIdx.x; i < TILE_M * PIECES; i += THREADS) {
        const int m = i / PIECES, piece = i % PIECES, token = min(m / GROUP, TOKENS - 1);
        const bool live = m < TOKENS * GROUP && rows.slot[token] != PAD;
        const u16* from = q + (live ? origin + token * stride + m % GROUP * E + piece * 8 : 0);
        copy_async<16>(q_tile + m * PITCH + piece * 16, from, live);
    }
    cp_async_commit();

    Softmax f;
    f.clear();
    char* const my_q = q_tile + warp * (MT * 16) * PITCH;
    for (Run run = next_run(rows, 0); run.begin < TOKENS; run = next_run(rows, run.end)) {
        const int all = run.high / KEYS + 1, end = i64(all) * (share + 1) / shares;
        const int plain = run.begin == 0 && run.end == TOKENS ? (run.low + 1) / KEYS : 0;  // tiles that all rows see in full
        KeyLoader load = {pages, block_table + i64(run.slot) * max_blocks, run.high, head, {}};
        int tile = i64(all) * share / shares;
        if (tile < end) {
            load.look_up(tile);
            load.copy(stages + tile % 2 * STAGE, tile);
            load.look_up(tile + 1);
        }
        for (; tile < end; ++tile) {
            const char* stage = stages + tile % 2 * STAGE;
            cp_async_wait<0>();
            __syncthreads();  // this tile is here, and nobody reads the last one any more
            if (tile + 1 < end) {
                load.copy(stages + (tile + 1) % 2 * STAGE, tile + 1);
                load.look_up(tile + 2);
            }
            float s[MT][KEYS / 8][4];
            scores(s, my_q, stage);
            if (tile >= plain) hide(s, rows, run, tile * KEYS);
            f.soften(s, scale);
            f.add(s, stage + KEYS * PITCH);
        }
        __syncthreads();  // before the next run's keys
    }
    cp_async_wait<0>();
    __syncthreads();

    pdl_before_stores();
    if (shares == 1) {
        store(my_q, f, out + origin, stride, count);
        return;
    }
    const int meeting = tile_index * kv_heads + head;
    Part* parts = partials + i64(meeting) * gridDim.y;
    store_part(parts[share], f, scale);
    int* last = reinterpret_cast<int*>(smem);
    __syncthreads();
    if (threadIdx.x == 0) *last = arrive_last(arrivals + meeting, shares);
    __syncthreads();
    if (*last) combine(parts, shares, out + origin, stride, count);
}
