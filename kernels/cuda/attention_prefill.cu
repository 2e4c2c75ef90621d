// out[R, H, E] = softmax(q · kᵀ · scale) · v over the paged cache for many rows: a row sees tokens 0 .. its own of its slot.
//
// Bound by the flops of the two products. The trick: the query heads that share a key head are rows of one tile, so a tile covers few tokens and
// little of what it computes is masked; and a tile walks the keys of every run of rows of one slot by itself, so that any mix of prompts is one
// launch.
//
// Flash attention (arXiv 2307.08691): a warp owns 16 · MT query rows, scores never leave registers, and the next keys and values arrive
// meanwhile.
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

// s[16 · MT, KEYS] = queries · keys, both in shared memory.
inline __device__ void scores(float (&s)[MT][KEYS / 8][4], const char* q, const char* keys) {
    const int lane = threadIdx.x % WARP;
    const char* query = q + lane % 16 * PITCH + lane / 16 * 16;
    const char* key = keys + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
    for (int k = 0; k < E / 16; ++k) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) ldmatrix4(a[m], query + m * 16 * PITCH + k * 32);
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            u32 b[4];
            ldmatrix4(b, key + n * 16 * PITCH + k * 32);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma_bf16(s[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                mma_bf16(s[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
            }
        }
    }
}

// What a row does not see, of the tokens from `from` on: those after its own, and all for rows outside of the run.
inline __device__ void hide(float (&s)[MT][KEYS / 8][4], const TileRows& rows, const Run& run, int from) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = ((warp * MT + m) * 16 + h * 8 + lane / 4) / GROUP;
            const int last = token >= run.begin && token < run.end ? rows.position[token] : -1;
            const int left = last - from - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (8 * n + i > left) s[m][n][2 * h + i] = NEVER;
        }
}

inline __device__ float quad_sum(float v) {
    v += __shfl_xor_sync(ALL_LANES, v, 1);
    return v + __shfl_xor_sync(ALL_LANES, v, 2);
}

// The running softmax of a warp's rows: lane l has rows l/4 and l/4 + 8 of each tile of 16, of their columns two in eight.
struct Softmax {
    float top[MT][2], sum[MT][2];
    float o[MT][E / 8][4];

    inline __device__ void clear() {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            top[m][0] = top[m][1] = NEVER, sum[m][0] = sum[m][1] = 0;
#pragma unroll
            for (int n = 0; n < E / 8; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
        }
    }
    // Scores to probabilities. scale: of scores, times log2 e, positive.
    inline __device__ void soften(float (&s)[MT][KEYS / 8][4], float scale) {
        float high[MT][2];
        bool higher = false;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float v = NEVER;
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n) v = fmaxf(v, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 1));
                v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 2));
                high[m][h] = v;
                higher |= v > top[m][h];
            }
        if (__any_sync(ALL_LANES, higher)) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float old = top[m][h];
                    top[m][h] = fmaxf(old, high[m][h]);
                    const float less = old == NEVER ? 0.0f : exp2_fast((old - top[m][h]) * scale);
                    sum[m][h] *= less;
#pragma unroll
                    for (int n = 0; n < E / 8; ++n) o[m][n][2 * h] *= less, o[m][n][2 * h + 1] *= less;
                }
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float zero = top[m][h] == NEVER ? 0.0f : top[m][h] * scale;  // a row that has seen nothing yet
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; ++i) {
                        s[m][n][i] = exp2_fast(__fmaf_rn(s[m][n][i], scale, -zero));
                        sum[m][h] += s[m][n][i];
                    }
            }
    }
    // o += probabilities · values.
    inline __device__ void add(const float (&p)[MT][KEYS / 8][4], const char* values) {
        const int lane = threadIdx.x % WARP;
        const char* value = values + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            u32 a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[m][i] = pack_bf16(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < E / 16; ++n) {
                u32 b[4];
                ldmatrix4_transposed(b, value + k * 16 * PITCH + n * 32);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma_bf16(o[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma_bf16(o[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
    }
};

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
