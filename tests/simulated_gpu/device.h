// A GPU that is simulated on the CPU: its devices, memory, streams and events, which the files beside this one give the
// names of CUDA and NCCL. Device memory is host memory at its own address; what is queued on a stream is run by the
// thread that queues it or, where something of the stream is still awaited, by a thread of the stream; or as late as may
// be, when somebody waits for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace simulated {

struct Settings {
  int num_devices = 1;                  // SIMULATED_GPU_COUNT
  std::size_t memory = 4ull << 30;      // SIMULATED_GPU_MEMORY, bytes of each device
  bool has_peers = true;                // SIMULATED_GPU_PEERS, 0 or 1: whether devices reach each other's memory
  bool is_late = false;                 // SIMULATED_GPU_LATE, 0 or 1: what is queued runs when it is awaited
  std::string state;                    // SIMULATED_GPU_STATE: a file in which processes count what they hold
  std::string carried;                  // SIMULATED_GPU_CARRIED: a file in which they note what crosses, a line each
};
const Settings& settings();

[[noreturn]] void fail(const std::string& what);
[[noreturn]] void missing(const char* name);
void note_carried(const char* what, std::size_t bytes);

// --- devices ---------------------------------------------------------------------------------------------------------

constexpr const char* NAME = "Simulated GPU";
constexpr int COMPUTE_CAPABILITY = 9;   // and nothing after the point
std::string uuid(int physical);         // 16 bytes
int num_visible();                      // as CUDA_VISIBLE_DEVICES says
int physical(int device);
int current_device();
void set_device(int device);
bool has_context();                     // of the calling thread
void make_context();                    // what most functions of the runtime do on their way

// --- memory ----------------------------------------------------------------------------------------------------------

enum class Kind { device, pinned, imported };

struct Allocation {
  char* base;
  std::size_t bytes;
  int device;
  Kind kind;
  std::size_t offset;                   // in the file that holds the device's memory of this process
};

struct Handle {                         // what another process opens; 64 bytes, as CUDA's
  char magic[8];
  int pid, fd, physical, unused;
  std::uint64_t offset, bytes;
  char rest[24];
};
static_assert(sizeof(Handle) == 64);

constexpr std::size_t PAGE = 4096;
std::size_t rounded(std::size_t bytes, std::size_t to = PAGE);

std::optional<std::size_t> take(int device, std::size_t bytes);              // an offset; none if the device is full
void give(int device, std::size_t offset, std::size_t bytes);
char* reserve(std::size_t bytes);                                            // addresses that nothing lies at
bool map(char* at, std::size_t bytes, int device, std::size_t offset);
void unmap(char* at, std::size_t bytes);                                     // to touch them is a crash from now on
char* allocate(int device, std::size_t bytes);                               // null if the device is full
char* allocate_pinned(std::size_t bytes);
void register_pinned(char* base, std::size_t bytes);
void note(const Allocation& allocation);                                     // for `find`
bool release(const void* base);
void forget(const void* base);                                               // no longer for `find`
std::optional<Allocation> find(const void* address);
std::size_t bytes_used_of(int physical);                                     // by all processes that live
Handle export_memory(const Allocation& allocation);
char* import_memory(const Handle& handle, int device);                       // null if its process is gone

// --- streams and events ----------------------------------------------------------------------------------------------

class Stream;
// 0, 1 and 2 are the default stream of a device: of the thread's own, unless another is named.
Stream* stream_of(void* handle, int device = current_device());
Stream* new_stream(int device);
int device_of(Stream* stream);
// Queue work. `waits`: it takes time that is not the caller's, as a kernel that spins or a message of a peer does.
std::uint64_t enqueue(Stream* stream, std::function<void()> work, bool waits = false);
void want(Stream* stream, std::uint64_t number);   // as soon as may be, and all before it; nobody waits here
void synchronize(Stream* stream);
void synchronize_device(int device);
bool is_idle(Stream* stream);

class Event;
Event* new_event();
void delete_event(Event* event);
void record(Event* event, Stream* stream);
bool is_done(Event* event);
void synchronize(Event* event);
void wait(Stream* stream, Event* event);
double milliseconds(Event* from, Event* to);

}  // namespace simulated
