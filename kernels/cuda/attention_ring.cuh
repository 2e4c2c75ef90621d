// A warp's ring in shared memory: how chunks of keys and values get there.
//
// No two lanes share what they load: a lane's copies land in places of its own, in the order in which it later reads them as fragments.
#pragma once

#include "attention.cuh"
#include "attention_work.cuh"
#include "bulk.cuh"

constexpr int K16 = E / 32, K8 = E % 32 / 16;  // a key in pieces of 4 · 16 bytes and of 4 · 8 bytes
constexpr int V16 = E / 64, V8 = E % 64 / 32, V4 = E % 32 / 16;  // a value in pieces of 8 · 16, 8 · 8 and 8 · 4 bytes
constexpr int SLOT_BYTES = CHUNK * E * 2;                        // a chunk's keys, or its values
constexpr int RING_BYTES = SLOTS * SLOT_BYTES;
static_assert(SLOTS >= 2);

struct Cache {
    Pages pages;
    const int* block_table;  // [slots, max_blocks]
    int max_blocks, blocks;
};

// The chunks of a warp, one after the other, with the table entries of the next 32 to 64 at hand.
class Loader {
    struct Batch {
        int chunk, end;  // of the row: the next one and the last
        int len, head, entry;  // entry: of this lane's chunk
    };
    const Cache& cache;
    const Work& w;
    const Rows& rows;
    Items* ahead;  // the split that the batch after `next` is in; kept in shared memory, since it is seldom looked at
    int at, index;  // the first chunk of that batch; chunk of `now`
    Batch now, next;
    const char* from;
    int left;    // tokens of the chunk being copied
    bool turned;  // `next` is in use: another has to be fetched, once the copies are on their way

    inline __device__ const int* entries(int row, int chunk) const {
        return cache.block_table + i64(rows.slot[row]) * cache.max_blocks + chunk * CHUNK / BLOCK_TOKENS;
    }

   public:
    inline __device__ Loader(const Cache& cache, const Work& w, const Rows& rows, Items* ahead)
        : cache(cache), w(w), rows(rows), ahead(ahead) {}

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
        if (u32(b.entry) >= u32(cache.blocks)) b.entry = 0;  // read before the wait, it may be anything
        at += WARP * TEAM;
        return b;
    }
    // Ask for the first chunks to come into L2.
    inline __device__ void prefetch() const {
        const int lane = threadIdx.x % WARP, mine = next.chunk + lane * TEAM;
        if (lane < EARLY && mine < next.end) {
            const char* key = cache.pages.key(next.entry, next.head, mine * CHUNK % BLOCK_TOKENS);
            bulk_prefetch(key, SLOT_BYTES);
            bulk_prefetch(key + cache.pages.values, SLOT_BYTES);
        }
    }
    // Right after the start: this lane's first table entry, and where it is from, null for none.
    inline __device__ int first_entry() const { return next.entry; }
    inline __device__ const int* first_source() const {
        const int mine = next.chunk + int(threadIdx.x % WARP) * TEAM;
        return mine < next.end ? entries(ahead->row, mine) : nullptr;
    }
    inline __device__ void keys(char* slot) {
        const int lane = threadIdx.x % WARP, token = lane / 4, c = lane % 4;
        turned = now.chunk >= now.end;
        if (turned) now = next, index = 0;
        left = 0;
        if (now.chunk < now.end) {
            const int entry = __shfl_sync(ALL_LANES, now.entry, index);
            from = cache.pages.key(entry, now.head, now.chunk * CHUNK % BLOCK_TOKENS);
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
    }
    // The values that belong to the last keys.
    inline __device__ void values(char* slot, int member) {
        const int lane = threadIdx.x % WARP, column = lane / 4, c = lane % 4;
        if (left > 0) {
            const char* value = from + cache.pages.values + 2 * c * (E * 2);
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
        if (turned) next = fetch(member);
    }
};
