// out[R, H, E] = softmax(q · kᵀ · scale) · v over the paged cache, one token a row.
//
// Bound by the bytes of keys and values. The trick: no two lanes share what they load. A lane's asynchronous copies land in a ring of its own,
// in the order in which it later reads them as fragments of the tensor cores, so tens of kilobytes are in flight without a barrier, a bank
// conflict or a shuffle. That works because a product may take its inner index in any order, if both sides take the same: 16 contiguous bytes
// of a key are four fragment words, and so are 16 bytes of four values of neighbouring tokens after eight byte permutations.
//
// A worker is a cluster of CLUSTER blocks: its warps take chunks of 16 tokens in turn, each with its own running softmax; at the end of a split
// every warp sends its part to the block that owns those columns. Splits of one row meet in global memory, where the last one adds them up.
#include "attention_meet.cuh"

constexpr int NT = (GROUP + 7) / 8;            // tiles of 8 query rows
constexpr int K16 = E / 32, K8 = E % 32 / 16;  // a key in pieces of 4 · 16 bytes and of 4 · 8 bytes
constexpr int V16 = E / 64, V8 = E % 64 / 32, V4 = E % 32 / 16;  // a value in pieces of 8 · 16, 8 · 8 and 8 · 4 bytes
constexpr int SLOT_BYTES = CHUNK * E * 2;                        // a chunk's keys, or its values
constexpr int LANES_WANTED = THREADS / SLICE < TEAM ? THREADS / SLICE : TEAM;
constexpr int LANES = LANES_WANTED >= 8 ? 8 : LANES_WANTED >= 4 ? 4 : LANES_WANTED >= 2 ? 2 : 1;  // that add up one column
constexpr int PART = OUT + 2 * GROUP;  // floats of a split in global memory: columns, then maximum and sum of each row
static_assert(SLOTS >= 2 && LANES <= TEAM);

struct Args {
    const u16* q;
    const int* block_table;
    u16* out;
    u32* arrivals;    // [rows · kv_heads] zeros between launches
    float* partials;  // [rows · kv_heads, max_splits, PART]
    Pages pages;
    int max_blocks, blocks;
    float scale;  // of scores, times log2 e
};

// The chunks of a warp, one after the other, with the table entries of the next 32 to 64 at hand.
class Loader {
    struct Batch {
        int chunk, end;  // of the row: the next one and the last
        int len, head, entry;  // entry: of this lane's chunk
    };
    const Args& a;
    const Work& w;
    const Rows& rows;
    Items* ahead;  // the split that the batch after `next` is in; kept in shared memory, since it is seldom looked at
    int at, index;  // the first chunk of that batch; chunk of `now`
    Batch now, next;
    const char* from;
    int left;  // tokens of the chunk being copied

    inline __device__ const int* entries(int row, int chunk) const {
        return a.block_table + i64(rows.slot[row]) * a.max_blocks + chunk * CHUNK / BLOCK_TOKENS;
    }

   public:
    inline __device__ Loader(const Args& a, const Work& w, const Rows& rows, Items* ahead) : a(a), w(w), rows(rows), ahead(ahead) {}

    inline __device__ void start(int member) {
        at = ahead->first_chunk() + member;
        now = {0, 0, 0, 0, 0};
        next = fetch(member);
    }
    inline __device__ Batch fetch(int member) {
        Batch b = {0, 0, 0, 0, 0};
        __syncwarp();
        Items items = *ahead;
        __syncwarp();
        while (!items.done() && at >= items.end_chunk()) {
            items.next(w, rows);
            at = items.first_chunk() + member;
        }
        *ahead = items;
        if (items.done()) return b;
        b = {at, min(items.end_chunk(), at + WARP * TEAM), items.len, items.head, 0};
        const int mine = at + int(threadIdx.x % WARP) * TEAM;
        if (mine < b.end) b.entry = load_fresh(entries(items.row, mine));
        if (u32(b.entry) >= u32(a.blocks)) b.entry = 0;  // read before the wait, it may be anything
        at += WARP * TEAM;
        return b;
    }
    // Ask for the first chunks to come into L2.
    inline __device__ void prefetch() const {
        const int lane = threadIdx.x % WARP, mine = next.chunk + lane * TEAM;
        if (lane < EARLY && mine < next.end) {
            const char* key = a.pages.key(next.entry, next.head, mine * CHUNK % BLOCK_TOKENS);
            bulk_prefetch(key, SLOT_BYTES);
            bulk_prefetch(key + a.pages.values, SLOT_BYTES);
        }
    }
    // Right after the start: this lane's first table entry, and where it is from, null for none.
    inline __device__ int first_entry() const { return next.entry; }
    inline __device__ const int* first_source() const {
        const int mine = next.chunk + int(threadIdx.x % WARP) * TEAM;
        return mine < next.end ? entries(ahead->row, mine) : nullptr;
    }
    inline __device__ void keys(char* slot, int member) {
        const int lane = threadIdx.x % WARP, token = lane / 4, c = lane % 4;
        const bool turn = now.chunk >= now.end;
        if (turn) now = next, index = 0;
        left = 0;
        if (now.chunk < now.end) {
            const int entry = __shfl_sync(ALL_LANES, now.entry, index);
            from = a.pages.key(entry, now.head, now.chunk * CHUNK % BLOCK_TOKENS);
            left = now.len - now.chunk * CHUNK;
            const char* key = from + token * (E * 2) + c * 16;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool live = token + 8 * h < left;
#pragma unroll
                for (int s = 0; s < K16; ++s)
                    copy_async<16>(slot + (h * K16 + s) * 512 + lane * 16, key + h * 8 * E * 2 + s * 64, live);
                if constexpr (K8 > 0)
                    copy_async<8>(slot + 2 * K16 * 512 + h * 256 + lane * 8, key + h * 8 * E * 2 + K16 * 64 - c * 8, live);
            }
        }
        cp_async_commit();
        if (turn) next = fetch(member);
    }
    // The values that belong to the last keys.
    inline __device__ void values(char* slot) {
        const int lane = threadIdx.x % WARP, column = lane / 4, c = lane % 4;
        if (left > 0) {
            const char* value = from + a.pages.values + 2 * c * (E * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = i % 2 + i / 2 * 8;
                const bool live = 2 * c + token < left;
                const char* source = value + token * (E * 2);
#pragma unroll
                for (int s = 0; s < V16; ++s)
                    copy_async<16>(slot + (i * V16 + s) * 512 + lane * 16, source + s * 128 + column * 16, live);
                if constexpr (V8 > 0)
                    copy_async<8>(slot + 4 * V16 * 512 + i * 256 + lane * 8, source + V16 * 128 + column * 8, live);
                if constexpr (V4 > 0)
                    copy_async<4>(slot + 4 * V16 * 512 + 4 * V8 * 256 + i * 128 + lane * 4,
                                  source + V16 * 128 + V8 * 64 + column * 4, live);
            }
            now.chunk += TEAM, ++index;
        }
        cp_async_commit();
    }
};

// The running softmax of a warp over its chunks: for query rows lane/4 (+ 8) the maximum and this lane's part of the sum; for rows 2(lane%4)
// and the next (+ 8) the weighted values.
struct Softmax {
    float top[NT], sum[NT];
    float o[NT][E / 16][4];

    inline __device__ void clear() {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            top[t] = NEVER, sum[t] = 0;
#pragma unroll
            for (int m = 0; m < E / 16; ++m) o[t][m][0] = o[t][m][1] = o[t][m][2] = o[t][m][3] = 0;
        }
    }
};

// The query rows of a group, as fragments. A fragment has room for 16 rows; up to 8 rows fill it with two parts of their columns instead, and
// the product with one half of a key is then in its upper half, with the other in its lower half.
struct Query {
    u32 words[NT][E / 8];

    inline __device__ void load(const u16* group) {
        const int lane = threadIdx.x % WARP, c = lane % 4;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const int row = lane / 4 + 8 * t;
            const u16* from = group + row * E;
#pragma unroll
            for (int s = 0; s < K16; ++s) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (row < GROUP) v = *reinterpret_cast<const uint4*>(from + s * 32 + c * 8);
                words[t][4 * s] = v.x, words[t][4 * s + 1] = v.y, words[t][4 * s + 2] = v.z, words[t][4 * s + 3] = v.w;
            }
            if constexpr (K8 > 0) {
                uint2 v = make_uint2(0, 0);
                if (row < GROUP) v = *reinterpret_cast<const uint2*>(from + K16 * 32 + c * 4);
                words[t][4 * K16] = v.x, words[t][4 * K16 + 1] = v.y;
            }
        }
    }
};

// s[row, token]: products of the query rows with the chunk's keys; the second index is a fragment's, for 8 tokens.
inline __device__ void scores(float (&s)[2][4], const Query& q, const char* slot) {
    const int lane = threadIdx.x % WARP;
    const u32(&a)[E / 8] = q.words[0];
    const u32(&b)[E / 8] = q.words[NT - 1];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float other[4] = {0, 0, 0, 0};
        s[h][0] = s[h][1] = s[h][2] = s[h][3] = 0;
#pragma unroll
        for (int p = 0; p < K16; ++p) {
            const uint4 k = *reinterpret_cast<const uint4*>(slot + (h * K16 + p) * 512 + lane * 16);
            const int w = 4 * p;
            if constexpr (NT == 1) {
                mma_bf16(s[h], a[w], a[w + 2], a[w + 1], a[w + 3], k.x, k.y);
                mma_bf16(other, a[w], a[w + 2], a[w + 1], a[w + 3], k.z, k.w);
            } else {
                mma_bf16(s[h], a[w], b[w], a[w + 1], b[w + 1], k.x, k.y);
                mma_bf16(other, a[w + 2], b[w + 2], a[w + 3], b[w + 3], k.z, k.w);
            }
        }
        if constexpr (K8 > 0) {
            const uint2 k = *reinterpret_cast<const uint2*>(slot + 2 * K16 * 512 + h * 256 + lane * 8);
            mma_bf16(s[h], a[4 * K16], NT == 1 ? 0 : b[4 * K16], a[4 * K16 + 1], NT == 1 ? 0 : b[4 * K16 + 1], k.x, k.y);
        }
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) s[h][i] += other[NT == 1 ? i + 2 : i];
    }
}

// Scores to probabilities, as fragments of the product with the values. left: tokens of the chunk that exist.
inline __device__ void soften(Softmax& f, float (&s)[2][4], float scale, int left, u32 (&p)[NT][2]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) s[h][i] *= scale;
    if (left < CHUNK) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 2 * NT; ++i)
                if (8 * h + lane % 4 * 2 + i % 2 >= left) s[h][i] = NEVER;
    }
    float top[NT];
    bool higher = false;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
        top[t] = fmaxf(fmaxf(s[0][2 * t], s[0][2 * t + 1]), fmaxf(s[1][2 * t], s[1][2 * t + 1]));
        top[t] = fmaxf(top[t], __shfl_xor_sync(ALL_LANES, top[t], 1));
        top[t] = fmaxf(top[t], __shfl_xor_sync(ALL_LANES, top[t], 2));
        higher |= top[t] > f.top[t];
    }
    if (__any_sync(ALL_LANES, higher)) {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const float old = f.top[t];
            f.top[t] = fmaxf(old, top[t]);
            const float less = exp2_fast(old - f.top[t]);  // 0 at the first chunk
            f.sum[t] *= less;
            const float less0 = __shfl_sync(ALL_LANES, less, lane % 4 * 8), less1 = __shfl_sync(ALL_LANES, less, lane % 4 * 8 + 4);
#pragma unroll
            for (int m = 0; m < E / 16; ++m)
                f.o[t][m][0] *= less0, f.o[t][m][1] *= less1, f.o[t][m][2] *= less0, f.o[t][m][3] *= less1;
        }
    }
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float p0 = exp2_fast(s[h][2 * t] - f.top[t]), p1 = exp2_fast(s[h][2 * t + 1] - f.top[t]);
            f.sum[t] += p0 + p1;
            p[t][h] = pack_bf16(p0, p1);
        }
}

// o += values · probabilities for the two columns that word `v` of each of four tokens holds.
inline __device__ void add_columns(Softmax& f, int m, const u32 (&p)[NT][2], u32 v0, u32 v1, u32 v2, u32 v3) {
    const u32 a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
    const u32 a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);
#pragma unroll
    for (int t = 0; t < NT; ++t) mma_bf16(f.o[t][m], a0, a1, a2, a3, p[t][0], p[t][1]);
}
inline __device__ void add_values(Softmax& f, const u32 (&p)[NT][2], const char* slot) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int s = 0; s < V16; ++s) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const uint4*>(slot + (i * V16 + s) * 512 + lane * 16);
        add_columns(f, 4 * s, p, v[0].x, v[1].x, v[2].x, v[3].x);
        add_columns(f, 4 * s + 1, p, v[0].y, v[1].y, v[2].y, v[3].y);
        add_columns(f, 4 * s + 2, p, v[0].z, v[1].z, v[2].z, v[3].z);
        add_columns(f, 4 * s + 3, p, v[0].w, v[1].w, v[2].w, v[3].w);
    }
    if constexpr (V8 > 0) {
        uint2 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const uint2*>(slot + 4 * V16 * 512 + i * 256 + lane * 8);
        add_columns(f, 4 * V16, p, v[0].x, v[1].x, v[2].x, v[3].x);
        add_columns(f, 4 * V16 + 1, p, v[0].y, v[1].y, v[2].y, v[3].y);
    }
    if constexpr (V4 > 0) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = *reinterpret_cast<const u32*>(slot + 4 * V16 * 512 + 4 * V8 * 256 + i * 128 + lane * 4);
        add_columns(f, E / 16 - 1, p, v[0], v[1], v[2], v[3]);
    }
}

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
inline __device__ void combine(const Args& a, const float* part, int count, u16* out) {
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
inline __device__ void finish(const Args& a, const Work& w, const Meeting& meet, const Items it, u32 rank, u32* last) {
    const int pair = it.row * w.kv_heads + it.head, part = threadIdx.x % LANES;
    u16* out = a.out + i64(pair) * OUT;
    float* parts = a.partials + i64(pair) * w.max_splits * PART;
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
    if (threadIdx.x == 0) *last = arrive_last(a.arrivals + pair, it.count * CLUSTER);
    __syncthreads();
    if (*last) combine(a, parts, it.count, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_decode(const u16* q, const u16* cache, const int* block_table, const int* row_slot, const int* positions, u16* out,
                     u32* arrivals, float* partials, i64 block_bytes, i64 value_bytes, int rows_, int kv_heads, int blocks,
                     int slots, int max_blocks, int min_tiles, int max_splits, u32 step, float scale) {
    const Pages pages = {reinterpret_cast<const char*>(cache), block_bytes, value_bytes};
    const Args a = {q, block_table, out, arrivals, partials, pages, max_blocks, blocks, scale};
    const Work w = {row_slot, positions, rows_, kv_heads, slots, max_blocks * BLOCK_TOKENS, min_tiles, max_splits};
    extern __shared__ __align__(128) char smem[];
    const int warp = threadIdx.x / WARP;
    char* const ring = smem + 16 + warp * (SLOTS * SLOT_BYTES);
    float* floats = reinterpret_cast<float*>(smem + 16 + WARPS * SLOTS * SLOT_BYTES);
    Meeting meet = {reinterpret_cast<float (*)[PITCH]>(floats), reinterpret_cast<float2 (*)[GROUP]>(floats + TEAM * PITCH),
                    reinterpret_cast<u64*>(smem), 0};
    u32* last = reinterpret_cast<u32*>(smem + 8);
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
    Loader loader(a, w, rows, here + 1);
    loader.start(member);
    loader.prefetch();
    pdl_wait();

    // The first copies go where the rows and the table said before the wait. What they say now decides whether that was right.
    for (;;) {
        const int entry = loader.first_entry();
        const int* source = loader.first_source();
#pragma unroll 1
        for (int s = 0; s < SLOTS; s += 2) {
            loader.keys(ring + s * SLOT_BYTES, member);
            if (s + 1 < SLOTS) loader.values(ring + (s + 1) * SLOT_BYTES);
        }
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
        Query query;
        query.load(q + i64(here->row * kv_heads + here->head) * OUT);
        Softmax f;
        f.clear();
        const int end = here->end_chunk(), len = here->len;
        for (int chunk = here->first_chunk() + member; chunk < end; chunk += TEAM) {
            float s[2][4];
            u32 p[NT][2];
            cp_async_wait<SLOTS - 1>();
            scores(s, query, slot);
            if constexpr (SLOTS % 2 == 0)
                loader.keys(slot, member);
            else
                loader.values(slot);
            slot = slot == ring + (SLOTS - 1) * SLOT_BYTES ? ring : slot + SLOT_BYTES;
            soften(f, s, scale, len - chunk * CHUNK, p);
            cp_async_wait<SLOTS - 1>();
            add_values(f, p, slot);
            if constexpr (SLOTS % 2 == 0)
                loader.values(slot);
            else
                loader.keys(slot, member);
            slot = slot == ring + (SLOTS - 1) * SLOT_BYTES ? ring : slot + SLOT_BYTES;
        }
        send_all(meet, member, f);
        meet.gather(rank);
        finish(a, w, meet, *here, rank, last);
        if (advance(w, rows, here)) meet.arrive(), meet.wait();
    }
    for (int r = worker; r < rows_; r += workers) {
        if (rows.slot[r] != PAD || rank != 0) continue;
        u32* zeros = reinterpret_cast<u32*>(out + i64(r) * kv_heads * OUT);
        for (int i = threadIdx.x; i < kv_heads * OUT / 2; i += THREADS) zeros[i] = 0;
    }
}
