// The work list of attention_decode, which no kernel writes: every worker computes its own part from the rows' lengths.
//
// It does so before it waits for its predecessor, from the lengths that it finds then: they are this step's, unless the step has just begun.
// After the wait `same` says whether they were; if not, it does so again.
//
// A row's keys are cut into splits by its own length alone, so that what a row gets does not depend on the rows beside it; then the splits
// of all rows and heads, in one line and weighed by their tokens, are dealt to the workers in equal parts.
#pragma once

#include "common.cuh"

constexpr int CHUNK = 16;  // tokens that a warp takes at a time
constexpr int THREADS = WARPS * WARP;
constexpr int TEAM = CLUSTER * WARPS;  // warps of a worker; they take chunks in turn
constexpr int TILE = CHUNK * TEAM;     // tokens of a round

struct Work {
    const int* row_slot;
    const int* positions;
    int rows, kv_heads, slots, max_len;
    int min_tiles, max_splits;  // a split has at least so many tiles, a row at most so many splits
};

// What all threads know of the rows, in shared memory.
struct Rows {
    int* base;  // [rows] cost of all rows before, in tiles
    int* len;   // [rows] tokens that the row sees, 0 for a padding row
    int* slot;  // [rows]
    int* size;  // [rows] tiles of a split
    int* count; // [rows] splits
    int* sums;  // [WARPS] scratch

    inline __device__ Rows(int* at, int rows)
        : base(at + WARPS), len(base + rows), slot(len + rows), size(slot + rows), count(size + rows), sums(at) {}
    // Of a row of one head. The end of a split costs about as much as a tile.
    inline __device__ int cost(int row) const { return ceil_div(len[row], TILE) + count[row]; }
};

// a / b for 0 <= a < 2^22, b > 0.
inline __device__ int divide(int a, int b) {
    const int q = int(__fdividef(float(a), float(b)));
    const int rest = a - q * b;
    return q + (rest >= b) - (rest < 0);
}

// The tokens that row r sees, 0 for a padding row. What is read before the wait may be anything, hence the limits.
inline __device__ int row_len(const Work& w, int r, int& slot) {
    slot = load_fresh(w.row_slot + r);
    const int len = load_fresh(w.positions + r) + 1;
    if (u32(slot) >= u32(w.slots)) slot = PAD;
    return slot == PAD ? 0 : min(max(len, 0), w.max_len);
}

// Whether `rows` holds what the rows are now. The same answer in all warps, if none writes the rows meanwhile.
inline __device__ bool same(const Work& w, const Rows& rows) {
    bool equal = true;
    for (int r = threadIdx.x % WARP; r < w.rows; r += WARP) {
        int slot;
        const int len = row_len(w, r, slot);
        equal &= len == rows.len[r] && slot == rows.slot[r];
    }
    return __all_sync(ALL_LANES, equal);
}

// Fills `rows` and returns the cost of all. For the whole block.
inline __device__ int weigh(const Work& w, const Rows& rows) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int total = 0;
    for (int first = 0; first < w.rows; first += THREADS) {
        const int r = first + int(threadIdx.x);
        int slot = PAD, len = 0;
        if (r < w.rows) len = row_len(w, r, slot);
        const int tiles = ceil_div(len, TILE);
        int size = w.min_tiles, count = len > 0;
        if (tiles > size) {
            size = max(size, divide(tiles + w.max_splits - 1, w.max_splits));
            count = divide(tiles + size - 1, size);
        }
        const int cost = (tiles + count) * w.kv_heads;
        int sum = cost;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, sum, offset);
            if (lane >= offset) sum += other;
        }
        if (lane == WARP - 1) rows.sums[warp] = sum;
        __syncthreads();
        int before = total;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            if (i < warp) before += rows.sums[i];
            total += rows.sums[i];
        }
        if (r < w.rows) {
            rows.base[r] = before + sum - cost;
            rows.len[r] = len, rows.slot[r] = slot, rows.size[r] = size, rows.count[r] = count;
        }
        __syncthreads();
    }
    return total;
}

// A worker's splits, in order.
struct Items {
    int row, head, split;
    int len, size, count;  // of the row: tokens, tiles of a split, splits
    int start, end;        // cost before this split, and before the next worker's

    // From the first split that begins at a cost of `from` or more, to the last before `to`.
    inline __device__ Items(const Work& w, const Rows& rows, int from, int to) : row(0), end(to) {
        for (int above = w.rows; above - row > 1;) {  // base[row] <= from < base[above]
            const int middle = (row + above) / 2;
            if (rows.base[middle] <= from)
                row = middle;
            else
                above = middle;
        }
        open(rows);
        const int cost = max(rows.cost(row), 1), inside = from - rows.base[row];
        head = divide(inside, cost);
        split = divide(inside - head * cost + size, size + 1);
        settle(w, rows);
    }
    inline __device__ bool done() const { return start >= end; }
    inline __device__ void next(const Work& w, const Rows& rows) {
        ++split;
        settle(w, rows);
    }
    // Chunks of the row that this split covers.
    inline __device__ int first_chunk() const { return split * size * TEAM; }
    inline __device__ int end_chunk() const { return min((split + 1) * size * TEAM, ceil_div(len, CHUNK)); }

   private:
    inline __device__ void open(const Rows& rows) { len = rows.len[row], size = rows.size[row], count = rows.count[row]; }
    inline __device__ void settle(const Work& w, const Rows& rows) {
        if (split >= count) {
            split = 0;
            if (++head >= w.kv_heads) {
                head = 0;
                do
                    if (++row >= w.rows) {
                        start = end;
                        return;
                    }
                while (rows.len[row] == 0);
                open(rows);
            }
        }
        start = rows.base[row] + head * rows.cost(row) + split * (size + 1);
    }
};

// This worker's part, into both of this warp's places. step: 2^32 / workers.
inline __device__ void deal(const Work& w, const Rows& rows, int worker, int workers, u32 step, Items* here) {
    const int total = weigh(w, rows);
    const Items items(w, rows, __umulhi(total, worker * step), worker + 1 == workers ? total : __umulhi(total, (worker + 1) * step));
    here[0] = items, here[1] = items;
}
// The loaded split is the one at hand again.
inline __device__ void restart(Items* here) {
    __syncwarp();
    const Items items = here[0];
    here[1] = items;
    __syncwarp();
}
// To the next split; false when there is none.
inline __device__ bool advance(const Work& w, const Rows& rows, Items* here) {
    Items items = *here;
    __syncwarp();
    items.next(w, rows);
    *here = items;
    __syncwarp();
    return !items.done();
}
