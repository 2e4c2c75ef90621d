// out[R, H, E] = softmax(q · kᵀ · scale) · v over the paged cache, one token a row.
//
// Bound by the bytes of keys and values. The trick: lanes copy asynchronously, each for itself (attention_ring.cuh), so tens of kilobytes are in
// flight without a barrier, a bank conflict or a shuffle; and everything but the copies themselves is done before the predecessor has ended
// (attention_work.cuh), even the request to bring the first keys to L2.
//
// A worker is a cluster of CLUSTER blocks: its warps take chunks of 16 tokens in turn, each with its own running softmax; at the end of a split
// every warp sends its part to the block that owns those columns. Splits of one row meet in global memory, where the last one adds them up.
#include "attention_chunk.cuh"
#include "attention_meet.cuh"

constexpr int LANES_WANTED = THREADS / SLICE < TEAM ? THREADS / SLICE : TEAM;
constexpr int LANES = LANES_WANTED >= 8 ? 8 : LANES_WANTED >= 4 ? 4 : LANES_WANTED >= 2 ? 2 : 1;  // that add up one column
constexpr int PART = OUT + 2 * GROUP;  // floats of a split in global memory: columns, then maximum and sum of each row

struct Result {
    u16* out;
    u32* arrivals;    // [rows · kv_heads] zeros between launches
    float* partials;  // [rows · kv_heads, max_splits, PART]
};

// What a warp has, to the owners of the columns.
inline __device__ void send_all(Meeting& meet, int member, const Softmax& f) {
    const int lane = threadIdx.x % WARP, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 8 * t + 2 * c + i;
            if (row >= GROUP) continue;
#pragma unroll
            for (int s = 0; s < V16; ++s) {
                float v[8];
#pragma unroll
                for (int j = 0; j < 4; ++j) v[2 * j] = f.o[t][4 * s + j][i], v[2 * j + 1] = f.o[t][4 * s + j][i + 2];
                meet.send(member, row * E + 64 * s + 8 * g, v);
            }
            if constexpr (V8 > 0) {
                constexpr int m = 4 * V16;
                const float v[4] = {f.o[t][m][i], f.o[t][m][i + 2], f.o[t][m + 1][i], f.o[t][m + 1][i + 2]};
                meet.send(member, row * E + 64 * V16 + 4 * g, v);
            }
            if constexpr (V4 > 0) {
                constexpr int m = E / 16 - 1;
                const float v[2] = {f.o[t][m][i], f.o[t][m][i + 2]};
                meet.send(member, row * E + E - 16 + 2 * g, v);
            }
        }
        float sum = f.sum[t];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (8 * t + g < GROUP)
            for (int rank = c; rank < CLUSTER; rank += 4) meet.send_stat(rank, member, 8 * t + g, f.top[t], sum);
    }
}

// Add up all splits of a row's heads, in order.
inline __device__ void combine(const float* part, int count, u16* out) {
    for (int at = threadIdx.x; at < OUT; at += THREADS) {
        float top = NEVER, sum = 0, value = 0;
        for (int first = 0; first < count; first += 4) {
            float2 stat[4];
            float v[4], high = top;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                stat[i] = make_float2(NEVER, 0), v[i] = 0;
                if (first + i < count) {
                    const float* from = part + i64(first + i) * PART;
                    stat[i] = load_fresh(reinterpret_cast<const float2*>(from + OUT) + at / E);
                    v[i] = load_fresh(from + at);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) high = fmaxf(high, stat[i].x);
            const float less = exp2_fast(top - high);
            top = high, sum *= less, value *= less;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float weight = exp2_fast(stat[i].x - high);
                sum += stat[i].y * weight, value += v[i] * weight;
            }
        }
        out[at] = f32_to_bf16(value / sum);
    }
}

// The end of a split: this block's columns from all warps of the worker, to the output or to where the row's splits meet.
inline __device__ void finish(const Result& to, const Work& w, const Meeting& meet, const Items it, u32 rank, u32* last) {
    const int pair = it.row * w.kv_heads + it.head, part = threadIdx.x % LANES;
    u16* out = to.out + i64(pair) * OUT;
    float* parts = to.partials + i64(pair) * w.max_splits * PART;
    float* mine = parts + i64(it.split) * PART;
    const bool whole = it.count == 1;
    for (int base = 0; base < SLICE; base += THREADS / LANES) {
        const int column = base + int(threadIdx.x) / LANES, at = rank * SLICE + column;
        const bool live = column < SLICE && at < OUT;
        const int row = live ? at / E : 0, safe = live ? column : 0;
        float top = NEVER, sum = 0, value = 0;
#pragma unroll
        for (int i = 0; i < TEAM / LANES; ++i) top = fmaxf(top, meet.stats[i * LANES + part][row].x);
#pragma unroll
        for (int i = LANES / 2; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, i));
#pragma unroll
        for (int i = 0; i < TEAM / LANES; ++i) {
            const float2 stat = meet.stats[i * LANES + part][row];
            const float weight = exp2_fast(stat.x - top);
            sum += stat.y * weight, value += meet.columns[i * LANES + part][safe] * weight;
        }
#pragma unroll
        for (int i = LANES / 2; i > 0; i /= 2) {
            sum += __shfl_xor_sync(ALL_LANES, sum, i);
            value += __shfl_xor_sync(ALL_LANES, value, i);
        }
        if (!live || part != 0) continue;
        if (whole) {
            out[at] = f32_to_bf16(value / sum);
        } else {
            mine[at] = value;
            if (at % E == 0) reinterpret_cast<float2*>(mine + OUT)[row] = make_float2(top, sum);
        }
    }
    if (whole) return;
    __syncthreads();
    if (threadIdx.x == 0) *last = arrive_last(to.arrivals + pair, it.count * CLUSTER);
    __syncthreads();
    if (*last) combine(parts, it.count, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_decode(const u16* q, const u16* cache, const int* block_table, const int* row_slot, const int* positions, u16* out,
                     u32* arrivals, float* partials, i64 block_bytes, i64 value_bytes, int rows_, int kv_heads, int blocks,
                     int slots, int max_blocks, int min_tiles, int max_splits, u32 step, float scale) {
    const Cache keys = {{reinterpret_cast<const char*>(cache), block_bytes, value_bytes}, block_table, max_blocks, blocks};
    const Result result = {out, arrivals, partials};
    const Work w = {row_slot, positions, rows_, kv_heads, slots, max_blocks * BLOCK_TOKENS, min_tiles, max_splits};
    extern __shared__ __align__(128) char smem[];
    const int warp = threadIdx.x / WARP;
    u64* full = reinterpret_cast<u64*>(smem);
    u32* last = reinterpret_cast<u32*>(smem + 8);
    char* const ring = smem + 16 + warp * RING_BYTES;
    float* floats = reinterpret_cast<float*>(smem + 16 + WARPS * RING_BYTES);
    Meeting meet = {reinterpret_cast<float (*)[PITCH]>(floats), reinterpret_cast<float2 (*)[GROUP]>(floats + TEAM * PITCH),
                    full, 0};
    int* ints = reinterpret_cast<int*>(floats + TEAM * (PITCH + 2 * GROUP));
    Items* here = reinterpret_cast<Items*>(ints) + 2 * warp;  // the split at hand, and the one that is loaded
    const Rows rows(ints + WARPS * 2 * (sizeof(Items) / 4), rows_);
    const u32 rank = cluster_rank();
    const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;
    const int member = warp * CLUSTER + rank;

    pdl_begin();
    pdl_launch();
    meet.init();
    deal(w, rows, worker, workers, step, here);
    Loader loader(keys, w, rows, here + 1);
    loader.start(member);
    loader.prefetch();
    pdl_wait();

    Query query;
    // The first copies go where the rows and the table said before the wait. What they say now decides whether that was right.
    for (;;) {
        const int entry = loader.first_entry();
        const int* source = loader.first_source();
#pragma unroll 1
        for (int s = 0; s < SLOTS; s += 2) {
            loader.keys(ring + s * SLOT_BYTES);
            if (s + 1 < SLOTS) loader.values(ring + (s + 1) * SLOT_BYTES, member);
        }
        if (!here->done()) query.load(q + i64(here->row * kv_heads + here->head) * OUT);
        const int entry_now = source != nullptr ? load_fresh(source) : entry;
        const bool as_before = same(w, rows);
        if (as_before && __all_sync(ALL_LANES, entry_now == entry)) break;
        cp_async_wait<0>();
        if (as_before)
            restart(here);
        else
            deal(w, rows, worker, workers, step, here);
        loader.start(member);
    }
    meet.ready();

    char* slot = ring;
    pdl_before_stores();
    while (!here->done()) {
        Softmax f;
        f.clear();
        const int end = here->end_chunk(), len = here->len;
        for (int chunk = here->first_chunk() + member; chunk < end; chunk += TEAM) {
            float s[2][4];
            u32 p[NT][2];
            cp_async_wait<SLOTS - 1>();
            scores(s, query, slot);
            if constexpr (SLOTS % 2 == 0)
                loader.keys(slot);
            else
                loader.values(slot, member);
            slot = slot == ring + (SLOTS - 1) * SLOT_BYTES ? ring : slot + SLOT_BYTES;
            soften(f, s, scale, len - chunk * CHUNK, p);
            cp_async_wait<SLOTS - 1>();
            add_values(f, p, slot);
            if constexpr (SLOTS % 2 == 0)
                loader.values(slot, member);
            else
                loader.keys(slot);
            slot = slot == ring + (SLOTS - 1) * SLOT_BYTES ? ring : slot + SLOT_BYTES;
        }
        send_all(meet, member, f);
        meet.gather(rank);
        finish(result, w, meet, *here, rank, last);
        if (!advance(w, rows, here)) break;
        query.load(q + i64(here->row * kv_heads + here->head) * OUT);
        meet.arrive();
        meet.wait();
    }
    for (int r = worker; r < rows_; r += workers) {
        if (rows.slot[r] != PAD || rank != 0) continue;
        u32* zeros = reinterpret_cast<u32*>(out + i64(r) * kv_heads * OUT);
        for (int i = threadIdx.x; i < kv_heads * OUT / 2; i += THREADS) zeros[i] = 0;
    }
}
