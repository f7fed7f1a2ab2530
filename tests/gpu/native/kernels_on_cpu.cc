// The kernels' own text, and how each is called with arguments packed as the driver reads them.
#include KERNELS

#include <cstring>
#include <tuple>
#include <utility>

#include "emulator.h"

namespace {

// Each argument lies at the next multiple of its own alignment.
constexpr size_t place(size_t end, size_t alignment) {
    return (end + alignment - 1) / alignment * alignment;
}

template <typename... Arguments>
constexpr size_t packed_bytes() {
    size_t end = 0;
    ((end = place(end, alignof(Arguments)) + sizeof(Arguments)), ...);
    return end;
}

template <typename Argument>
Argument next(const unsigned char *packed, size_t &end) {
    Argument value;
    end = place(end, alignof(Argument));
    memcpy(&value, packed + end, sizeof value);
    end += sizeof value;
    return value;
}

template <auto function, typename... Arguments>
void call(const void *packed) {
    size_t end = 0;
    // Braces order the calls from left to right.
    std::apply(function, std::tuple<Arguments...>{next<Arguments>(static_cast<const unsigned char *>(packed), end)...});
}

template <auto function, typename... Arguments>
constexpr Kernel kernel(const char *name, uint32_t threads, void (*)(Arguments...)) {
    return {name, threads, packed_bytes<Arguments...>(), call<function, Arguments...>};
}

#define KERNEL(name, threads) kernel<&name>(#name, threads, &name)

}  // namespace

const Kernel kernels[] = {
    KERNEL(blake3_segments, SEGMENT_LEAVES),
    KERNEL(blake3_extents, JOIN_THREADS),
    KERNEL(crc64_segments, SEGMENT_LEAVES),
    KERNEL(crc64_extents, JOIN_THREADS),
};
const size_t kernel_count = sizeof kernels / sizeof *kernels;
const Range constant_memory = {reinterpret_cast<uintptr_t>(&TABLES), sizeof TABLES, false};
