// Runs the kernels on the CPU: a fiber for each thread of a block, blocks one after the other.
//
// One rule: a fiber runs until its next barrier, and no further before all others of its block are there. In
// which order they run is the caller's choice (forward, reverse, or random from a seed, a new one after each
// barrier). Shared memory is poisoned before each block.
//
// The compiler puts a call before each load and store of the kernels (-fsanitize=kernel-address, whose hooks
// are below). So a byte outside the ranges that the test has allowed is found whatever lies there, and so are
// two threads that touch one byte without a barrier between them, one of them writing, in whatever order
// they happen to run.
#include "emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <unordered_map>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#include "cuda_on_cpu.h"

extern char __start_shared_memory, __stop_shared_memory;

Index threadIdx, blockIdx, gridDim;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint32_t MOST_THREADS = 128;

enum class Order { forward, reverse, random };

struct Fiber {
    ucontext_t context;
    bool finished;
};

// Who touched a byte last; `none` for nobody.
struct Touch {
    static constexpr uint32_t none = ~0u;
    uint32_t block = none, epoch = 0, thread = 0;
};

struct Byte {
    Touch written, read;
    bool read_by_others = false;  // than read.thread, in the same epoch
};

ucontext_t scheduler;
Fiber fibers[MOST_THREADS];
uint32_t running;
uint32_t epoch;  // counts barriers
char *stacks;
const Kernel *kernel;
const void *arguments;
char fault[200];
std::vector<Range> given, allowed;
std::unordered_map<uintptr_t, Byte> bytes_touched;

bool within(uintptr_t at, size_t bytes, uintptr_t start, size_t size) {
    return at >= start && at - start <= size && bytes <= size - (at - start);
}

const Range *range_of(uintptr_t at, size_t bytes) {
    const auto starts_behind = [](uintptr_t place, const Range &range) { return place < range.start; };
    const auto next = std::upper_bound(allowed.begin(), allowed.end(), at, starts_behind);
    if (next == allowed.begin()) return nullptr;
    const Range &range = *(next - 1);
    return within(at, bytes, range.start, range.bytes) ? &range : nullptr;
}

// Does not return to the fiber: the launch ends here.
void fail(const char *what, uintptr_t at, size_t bytes) {
    snprintf(fault, sizeof fault, "%s: block %u thread %u: %s, %zu bytes at %#zx", kernel->name, blockIdx.x,
             threadIdx.x, what, bytes, at);
    swapcontext(&fibers[running].context, &scheduler);
}

bool concurrent(const Touch &touch, bool shared) {
    if (touch.block == Touch::none) return false;
    if (touch.block != blockIdx.x) return !shared;
    return touch.epoch == epoch && touch.thread != running;
}

void touch_byte(uintptr_t at, bool write, bool shared) {
    Byte &byte = bytes_touched[at];
    const Touch now = {blockIdx.x, epoch, running};
    if (concurrent(byte.written, shared)) return fail("a race with a store", at, 1);
    if (write) {
        const bool others = byte.read_by_others && byte.read.block == blockIdx.x && byte.read.epoch == epoch;
        if (others || concurrent(byte.read, shared)) return fail("a race with a load", at, 1);
        byte.written = now;
    } else {
        const bool same_epoch = byte.read.block == blockIdx.x && byte.read.epoch == epoch;
        byte.read_by_others = same_epoch && (byte.read_by_others || byte.read.thread != running);
        byte.read = now;
    }
}

void touch(uintptr_t at, size_t bytes, bool write) {
    if (within(at, bytes, reinterpret_cast<uintptr_t>(stacks), MOST_THREADS * STACK_BYTES)) return;
    const uintptr_t shared = reinterpret_cast<uintptr_t>(&__start_shared_memory);
    if (within(at, bytes, shared, &__stop_shared_memory - &__start_shared_memory)) {
        for (size_t i = 0; i < bytes; i++) touch_byte(at + i, write, true);
        return;
    }
    const Range *const range = range_of(at, bytes);
    if (range == nullptr) return fail(write ? "a store out of bounds" : "a load out of bounds", at, bytes);
    if (write && !range->writable) return fail("a store to what is read only", at, bytes);
    if (range->writable)
        for (size_t i = 0; i < bytes; i++) touch_byte(at + i, write, false);
}

void enter() {
    kernel->call(arguments);
    fibers[running].finished = true;
    swapcontext(&fibers[running].context, &scheduler);
}

// One turn of every fiber, to its next barrier or its end; returns how many have ended.
uint32_t run_to_barrier(const std::vector<uint32_t> &turn) {
    uint32_t finished = 0;
    for (const uint32_t thread : turn) {
        running = thread;
        threadIdx = {thread, 0, 0};
        swapcontext(&scheduler, &fibers[thread].context);
        if (fault[0] != 0) return 0;
        finished += fibers[thread].finished;
    }
    return finished;
}

void run_block(Order order, std::mt19937_64 &random) {
    memset(&__start_shared_memory, 0xA5, &__stop_shared_memory - &__start_shared_memory);
    for (uint32_t thread = 0; thread < kernel->threads; thread++) {
        Fiber &fiber = fibers[thread];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + thread * STACK_BYTES;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        fiber.finished = false;
        makecontext(&fiber.context, enter, 0);
    }
    std::vector<uint32_t> turn(kernel->threads);
    std::iota(turn.begin(), turn.end(), 0);
    if (order == Order::reverse) std::reverse(turn.begin(), turn.end());
    uint32_t finished = 0;
    while (finished < kernel->threads && fault[0] == 0) {
        if (order == Order::random) std::shuffle(turn.begin(), turn.end(), random);
        finished = run_to_barrier(turn);
        epoch++;
        // On a device it would hang, or do worse.
        if (finished != 0 && finished < kernel->threads)
            snprintf(fault, sizeof fault, "%s: %u of %u threads ended while the others wait at a barrier",
                     kernel->name, finished, kernel->threads);
    }
}

const Kernel *find(const char *name) {
    for (size_t i = 0; i < kernel_count; i++)
        if (strcmp(kernels[i].name, name) == 0) return &kernels[i];
    return nullptr;
}

}  // namespace

void __syncthreads() {
    swapcontext(&fibers[running].context, &scheduler);
}

// Atomic, hence no race; but within bounds as anything else.
uint32_t atomicAdd(uint32_t *at, uint32_t value) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(at);
    const Range *const range = range_of(address, 4);
    if (range == nullptr || !range->writable) fail("an atomic out of bounds", address, 4);
    const uint32_t before = *at;
    *at += value;
    return before;
}

extern "C" {

#define HOOKS(bytes)                                                                  \
    void __asan_load##bytes(uintptr_t at) { touch(at, bytes, false); }                \
    void __asan_store##bytes(uintptr_t at) { touch(at, bytes, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __asan_loadN(uintptr_t at, size_t bytes) { touch(at, bytes, false); }
void __asan_storeN(uintptr_t at, size_t bytes) { touch(at, bytes, true); }
void __asan_handle_no_return() {}

// What the next launch may touch: `count` ranges that do not overlap, beside its stacks, its arguments, shared
// and constant memory.
void allow_ranges(const Range *ranges, size_t count) {
    given.assign(ranges, ranges + count);
}

// Bytes of arguments that a kernel takes, or -1 if there is none of that name.
int64_t kernel_argument_bytes(const char *name) {
    const Kernel *const found = find(name);
    return found == nullptr ? -1 : static_cast<int64_t>(found->argument_bytes);
}

// Null, or what went wrong. order: 0 forward, 1 reverse, 2 random from `seed`.
const char *launch_kernel(const char *name, uint32_t grid, uint32_t threads, const void *packed,
                          uint64_t packed_bytes, int order, uint64_t seed) {
    kernel = find(name);
    if (kernel == nullptr) return "no kernel of that name";
    if (grid == 0 || threads != kernel->threads) return "a grid or block that the kernel is not made for";
    if (packed_bytes != kernel->argument_bytes) return "the arguments have another size";
    if (stacks == nullptr) {
        void *const got = mmap(nullptr, MOST_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (got == MAP_FAILED) return "no memory for stacks";
        stacks = static_cast<char *>(got);
    }
    arguments = packed;
    allowed = given;
    allowed.push_back(constant_memory);
    allowed.push_back({reinterpret_cast<uintptr_t>(packed), packed_bytes, false});
    std::sort(allowed.begin(), allowed.end(), [](const Range &a, const Range &b) { return a.start < b.start; });
    bytes_touched.clear();
    epoch = 0;
    fault[0] = 0;
    gridDim = {grid, 1, 1};
    std::mt19937_64 random(seed);
    for (uint32_t block = 0; block < grid && fault[0] == 0; block++) {
        blockIdx = {block, 0, 0};
        run_block(static_cast<Order>(order), random);
    }
    return fault[0] == 0 ? nullptr : fault;
}

}  // extern "C"
