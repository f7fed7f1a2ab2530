// A libcuda.so.1 with one device, whose memory is this process's and whose kernels run in the emulator.
//
// One rule: work in a stream is done as late as the driver may do it: when somebody waits for the stream, or
// for an event behind it, or uses the null stream. So code that forgets to wait, or to order two streams,
// reads what is not there yet. Every call is counted, what is alive too, and any call can be made to fail.
//
// Only what PyCUDA calls for this project is here; the test adds a function that fails for each other symbol
// that PyCUDA is linked against. Source: the CUDA driver API's reference (return codes are those of cuda.h).
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <sys/mman.h>

#include "emulator.h"

extern "C" void allow_ranges(const Range *ranges, size_t count);
extern "C" const char *launch_kernel(const char *name, uint32_t grid, uint32_t threads, const void *packed,
                                     uint64_t packed_bytes, int order, uint64_t seed);
extern "C" int64_t kernel_argument_bytes(const char *name);

namespace {

enum Result {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719,
};

struct Context {};

struct Stream {
    std::deque<std::function<void()>> pending;
    uint64_t queued = 0, done = 0;
    bool blocking = true;
};

struct Event {
    Stream *stream = nullptr;
    uint64_t behind = 0;
};

struct Function {
    std::string name;
};

struct Module {
    std::map<std::string, Function> functions;
};

struct Mapping {
    void *base;
    size_t mapped, bytes;
};

constexpr size_t PAGE = 4096;

int devices = 1;
Context primary;
int retained = 0, most_retained = 0;
thread_local std::vector<Context *> current;
Stream null_stream;
std::set<Stream *> streams;
std::set<Event *> events;
std::set<Module *> modules;
std::map<uintptr_t, Mapping> device_memory, host_memory;
std::map<uintptr_t, int> being_read;  // copies from pinned memory that are queued and not done
std::string image;
std::string complaint;  // what the emulator said
uint64_t downloaded = 0;
uint64_t calls = 0, failing_call = ~0ull;
Result failure = OK;
std::string failed_name;
int order = 0;
bool broken = false;  // after a fault a context answers every call with it

// Who frees something cannot do anything about a failure, and PyCUDA only prints a warning then.
bool cleans_up(const char *name) {
    for (const char *part : {"Destroy", "Free", "Unload", "Release", "Pop"})
        if (strstr(name, part) != nullptr) return true;
    return false;
}

Result entered(const char *name, bool needs_context = true) {
    if (needs_context && current.empty()) return INVALID_CONTEXT;
    if (cleans_up(name)) return OK;
    // Which context is current has nothing to do with the state of the device.
    const bool sticky = broken && strstr(name, "Push") == nullptr;
    if (calls++ == failing_call) failed_name = name;
    // A second try meets the same refusal; PyCUDA makes one after a failed allocation.
    if (failed_name == name) return failure;
    return sticky ? LAUNCH_FAILED : OK;
}

#define ENTER(needs_context)                                           \
    do {                                                          \
        const Result entry = entered(__func__, needs_context);    \
        if (entry != OK) return entry;                            \
    } while (0)

void drain(Stream &stream, uint64_t until) {
    while (stream.done < until) {
        std::function<void()> next = std::move(stream.pending.front());
        stream.pending.pop_front();
        stream.done++;
        next();
    }
}

void drain(Stream &stream) {
    drain(stream, stream.queued);
}

void drain_all(bool also_those_that_do_not_block) {
    for (Stream *stream : streams)
        if (stream->blocking || also_those_that_do_not_block) drain(*stream);
}

// The null stream waits for every stream that blocks, and is done at once.
void queue(Stream *stream, std::function<void()> work) {
    if (stream == nullptr) {
        drain_all(false);
        work();
        return;
    }
    stream->pending.push_back(std::move(work));
    stream->queued++;
}

bool known(Stream *stream) {
    return stream == nullptr || streams.count(stream) != 0;
}

// Ends where a page begins that nobody may touch, up to the 256 bytes that the driver aligns to.
Result map_memory(std::map<uintptr_t, Mapping> &table, uintptr_t *out, size_t bytes) {
    if (bytes == 0) return INVALID_VALUE;
    const size_t room = (bytes + PAGE - 1) / PAGE * PAGE;
    void *const base = mmap(nullptr, room + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    const uintptr_t first = reinterpret_cast<uintptr_t>(base) + PAGE;
    mprotect(reinterpret_cast<void *>(first), room, PROT_READ | PROT_WRITE);
    *out = (first + room - bytes) / 256 * 256;
    memset(reinterpret_cast<void *>(*out), 0xA5, bytes);
    table[*out] = {base, room + 2 * PAGE, bytes};
    return OK;
}

Result unmap_memory(std::map<uintptr_t, Mapping> &table, uintptr_t at) {
    const auto found = table.find(at);
    if (found == table.end()) return INVALID_VALUE;
    drain_all(true);
    munmap(found->second.base, found->second.mapped);
    table.erase(found);
    return OK;
}

bool covered(const std::map<uintptr_t, Mapping> &table, uintptr_t at, size_t bytes) {
    auto next = table.upper_bound(at);
    if (next == table.begin()) return false;
    --next;
    return at - next->first <= next->second.bytes && bytes <= next->second.bytes - (at - next->first);
}

void run_kernel(const std::string &name, uint32_t grid, uint32_t threads, const std::vector<unsigned char> &packed) {
    std::vector<Range> ranges;
    for (const auto &[at, mapping] : device_memory) ranges.push_back({at, mapping.bytes, true});
    allow_ranges(ranges.data(), ranges.size());
    const char *const said = launch_kernel(name.c_str(), grid, threads, packed.data(), packed.size(), order, calls);
    if (said != nullptr) {
        complaint = said;
        broken = true;
    }
}

}  // namespace

extern "C" {

// ---- for the tests ----

struct Alive {
    int retained, most_retained, depth, modules, streams, events, device_memory, host_memory, pending;
};

Alive fake_alive() {
    int pending = 0;
    for (Stream *stream : streams) pending += static_cast<int>(stream->pending.size());
    return {retained,
            most_retained,
            static_cast<int>(current.size()),
            static_cast<int>(modules.size()),
            static_cast<int>(streams.size()),
            static_cast<int>(events.size()),
            static_cast<int>(device_memory.size()),
            static_cast<int>(host_memory.size()),
            pending};
}

// All that a new process would find; what is alive stays.
void fake_reset(int device_count, int thread_order) {
    devices = device_count;
    order = thread_order;
    calls = 0;
    failing_call = ~0ull;
    failed_name.clear();
    complaint.clear();
    broken = false;
    most_retained = retained;
}

// The function that is call number `call` from now on (0 is the next) returns `code`, then and later. Those that
// free something are not counted.
void fake_fail(uint64_t call, int code) {
    calls = 0;
    failing_call = call;
    failure = static_cast<Result>(code);
    failed_name.clear();
}

// All objects but the memory at `kept` are gone, as after the last user of a context.
void fake_forget(uintptr_t kept) {
    drain_all(true);
    streams.clear();
    events.clear();
    modules.clear();
    host_memory.clear();
    const Mapping mapping = device_memory.at(kept);
    device_memory.clear();
    device_memory[kept] = mapping;
}

// The name of the call that was made to fail, or "".
const char *fake_failed() { return failed_name.c_str(); }

// Bytes that were copied to the host.
uint64_t fake_downloaded() { return downloaded; }

const char *fake_complaint() { return complaint.c_str(); }

// The last module that was loaded.
const void *fake_image(size_t *bytes) {
    *bytes = image.size();
    return image.data();
}

// ---- the driver ----

int cuInit(unsigned) {
    ENTER(false);
    return devices == 0 ? NO_DEVICE : OK;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return OK;
}

int cuDeviceGetCount(int *count) {
    ENTER(false);
    *count = devices;
    return OK;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER(false);
    if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

int cuDeviceGetName(char *name, int size, int) {
    ENTER(false);
    snprintf(name, static_cast<size_t>(size), "Emulated device");
    return OK;
}

int cuGetErrorString(int code, const char **text) {
    static thread_local char said[40];
    snprintf(said, sizeof said, "driver error %d", code);
    *text = said;
    return OK;
}

int cuDevicePrimaryCtxRetain(Context **context, int) {
    ENTER(false);
    *context = &primary;
    retained++;
    if (retained > most_retained) most_retained = retained;
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    if (retained == 0) return INVALID_CONTEXT;
    retained--;
    return OK;
}

int cuCtxPushCurrent_v2(Context *context) {
    ENTER(false);
    if (retained == 0) return INVALID_CONTEXT;
    current.push_back(context);
    return OK;
}

int cuCtxPopCurrent_v2(Context **context) {
    ENTER(true);
    *context = current.back();
    current.pop_back();
    return OK;
}

int cuCtxSynchronize() {
    ENTER(true);
    drain_all(true);
    return broken ? LAUNCH_FAILED : OK;
}

int cuModuleLoadDataEx(Module **module, const void *data, unsigned, int *, void **) {
    ENTER(true);
    uint32_t magic;
    uint64_t bytes;
    memcpy(&magic, data, sizeof magic);
    memcpy(&bytes, static_cast<const char *>(data) + 8, sizeof bytes);
    if (magic != 0xba55ed50) return INVALID_IMAGE;
    image.assign(static_cast<const char *>(data), 16 + bytes);
    modules.insert(*module = new Module);
    return OK;
}

int cuModuleUnload(Module *module) {
    ENTER(true);
    if (modules.erase(module) == 0) return INVALID_HANDLE;
    delete module;
    return OK;
}

int cuModuleGetFunction(Function **function, Module *module, const char *name) {
    ENTER(true);
    if (modules.count(module) == 0) return INVALID_HANDLE;
    if (kernel_argument_bytes(name) < 0) return NOT_FOUND;
    *function = &(module->functions[name] = {name});
    return OK;
}

// PyCUDA still calls it before each launch, which then names the shape again.
int cuFuncSetBlockShape(Function *, int x, int y, int z) {
    ENTER(true);
    return x > 0 && y == 1 && z == 1 ? OK : INVALID_VALUE;
}

// Arguments come as one packed buffer, which is how PyCUDA passes them.
int cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream *stream, void **arguments,
                   void **extra) {
    ENTER(true);
    if (arguments != nullptr || extra == nullptr || shared_bytes != 0 || !known(stream)) return INVALID_VALUE;
    // In the null stream it would hold up every other one, torch's too.
    if (stream == nullptr) return INVALID_HANDLE;
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1) return INVALID_VALUE;
    std::vector<unsigned char> packed;
    const unsigned char *start = nullptr;
    size_t bytes = 0;
    for (size_t i = 0; extra[i] != nullptr; i += 2) {
        if (extra[i] == reinterpret_cast<void *>(1)) start = static_cast<const unsigned char *>(extra[i + 1]);
        if (extra[i] == reinterpret_cast<void *>(2)) memcpy(&bytes, extra[i + 1], sizeof bytes);
    }
    if (static_cast<int64_t>(bytes) != kernel_argument_bytes(function->name.c_str())) return INVALID_VALUE;
    packed.assign(start, start + bytes);
    queue(stream, [=, name = function->name] { run_kernel(name, grid_x, block_x, packed); });
    return OK;
}

int cuMemAlloc_v2(uintptr_t *at, size_t bytes) {
    ENTER(true);
    return map_memory(device_memory, at, bytes);
}

int cuMemFree_v2(uintptr_t at) {
    ENTER(true);
    return unmap_memory(device_memory, at);
}

int cuMemHostAlloc(void **at, size_t bytes, unsigned) {
    ENTER(true);
    return map_memory(host_memory, reinterpret_cast<uintptr_t *>(at), bytes);
}

// The reference does not say that this waits for anything. Who could not wait has done what he can.
int cuMemFreeHost(void *at) {
    ENTER(true);
    if (being_read[reinterpret_cast<uintptr_t>(at)] > 0 && !broken && failed_name != "cuStreamSynchronize")
        complaint = "pinned memory is freed while a copy of it is on its way";
    return unmap_memory(host_memory, reinterpret_cast<uintptr_t>(at));
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER(true);
    *free_bytes = *total_bytes = size_t{1} << 30;
    return OK;
}

// Pinned memory is read when the copy is done, any other when it is asked for.
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, Stream *stream) {
    ENTER(true);
    if (!known(stream) || !covered(device_memory, to, bytes)) return INVALID_VALUE;
    void *const target = reinterpret_cast<void *>(to);
    if (covered(host_memory, reinterpret_cast<uintptr_t>(from), bytes)) {
        const uintptr_t pinned = (--host_memory.upper_bound(reinterpret_cast<uintptr_t>(from)))->first;
        being_read[pinned]++;
        queue(stream, [=] {
            memcpy(target, from, bytes);
            being_read[pinned]--;
        });
    } else {
        std::vector<char> staged(static_cast<const char *>(from), static_cast<const char *>(from) + bytes);
        queue(stream, [=, staged = std::move(staged)] { memcpy(target, staged.data(), bytes); });
    }
    return OK;
}

int cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t bytes) {
    return cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr);
}

int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, Stream *stream) {
    ENTER(true);
    if (!known(stream) || !covered(device_memory, from, bytes)) return INVALID_VALUE;
    downloaded += bytes;
    queue(stream, [=] { memcpy(to, reinterpret_cast<const void *>(from), bytes); });
    return OK;
}

int cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t bytes) {
    return cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr);
}

int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, Stream *stream) {
    ENTER(true);
    const bool both = covered(device_memory, to, bytes) && covered(device_memory, from, bytes);
    if (!known(stream) || !both) return INVALID_VALUE;
    queue(stream, [=] { memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes); });
    return OK;
}

int cuMemcpyDtoD_v2(uintptr_t to, uintptr_t from, size_t bytes) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr);
}

int cuStreamCreate(Stream **stream, unsigned flags) {
    ENTER(true);
    streams.insert(*stream = new Stream);
    (*stream)->blocking = (flags & 1) == 0;
    return OK;
}

int cuStreamDestroy_v2(Stream *stream) {
    ENTER(true);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    drain(*stream);
    for (Event *event : events)
        if (event->stream == stream) event->stream = nullptr;
    streams.erase(stream);
    delete stream;
    return OK;
}

int cuStreamSynchronize(Stream *stream) {
    ENTER(true);
    if (!known(stream)) return INVALID_HANDLE;
    if (stream == nullptr) drain_all(false);
    else drain(*stream);
    return broken ? LAUNCH_FAILED : OK;
}

int cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    ENTER(true);
    if (!known(stream) || events.count(event) == 0) return INVALID_HANDLE;
    Stream *const other = event->stream;
    const uint64_t behind = event->behind;
    if (other != nullptr) queue(stream, [=] { if (streams.count(other) != 0) drain(*other, behind); });
    return OK;
}

int cuEventCreate(Event **event, unsigned) {
    ENTER(true);
    events.insert(*event = new Event);
    return OK;
}

int cuEventDestroy_v2(Event *event) {
    ENTER(true);
    if (events.erase(event) == 0) return INVALID_HANDLE;
    delete event;
    return OK;
}

int cuEventRecord(Event *event, Stream *stream) {
    ENTER(true);
    if (!known(stream) || events.count(event) == 0) return INVALID_HANDLE;
    if (stream == nullptr) drain_all(false);
    event->stream = stream;
    event->behind = stream == nullptr ? 0 : stream->queued;
    return OK;
}

int cuEventSynchronize(Event *event) {
    ENTER(true);
    if (event->stream != nullptr) drain(*event->stream, event->behind);
    return broken ? LAUNCH_FAILED : OK;
}

// Always a millisecond: nothing here says how fast a device is.
int cuEventElapsedTime_v2(float *milliseconds, Event *, Event *) {
    ENTER(true);
    *milliseconds = 1;
    return OK;
}

}  // extern "C"
