// Devices, memory, streams and events: see device.h.
#include "device.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

namespace simulated {

namespace {

using Clock = std::chrono::steady_clock;

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == 0 ? otherwise : value;
}

// What lives as long as the process is never destroyed: threads of streams may outlast `main`.
template <typename T>
T& forever() {
  static T* value = new T();
  return *value;
}

}  // namespace

namespace {

Settings read_settings() {
  Settings settings;
  settings.num_devices = std::atoi(environment("SIMULATED_GPU_COUNT", "1"));
  settings.memory = std::strtoull(environment("SIMULATED_GPU_MEMORY", "4294967296"), nullptr, 10);
  settings.has_peers = std::atoi(environment("SIMULATED_GPU_PEERS", "1")) != 0;
  settings.is_late = std::atoi(environment("SIMULATED_GPU_LATE", "0")) != 0;
  settings.state = environment("SIMULATED_GPU_STATE", "");
  settings.carried = environment("SIMULATED_GPU_CARRIED", "");
  return settings;
}

Settings& mutable_settings() {
  static Settings found = read_settings();
  return found;
}

}  // namespace

const Settings& settings() { return mutable_settings(); }

// For processes that are forked from one that has asked for devices, before they use one.
extern "C" void simulated_gpu_read_environment() { mutable_settings() = read_settings(); }

void fail(const std::string& what) {
  std::fprintf(stderr, "simulated GPU: %s\n", what.c_str());
  std::fflush(stderr);
  std::abort();
}

void missing(const char* name) { fail(std::string(name) + " is called, and the simulated GPU does not provide it"); }

void note_carried(const char* what, std::size_t bytes) {
  if (settings().carried.empty()) return;
  int fd = open(settings().carried.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  std::string line = std::string(what) + " " + std::to_string(bytes) + "\n";
  if (fd < 0 || write(fd, line.data(), line.size()) < 0) fail("SIMULATED_GPU_CARRIED cannot be written");
  close(fd);
}

// --- devices ---------------------------------------------------------------------------------------------------------

namespace {

const std::vector<int>& visible() {
  static const std::vector<int> found = [] {
    std::vector<int> devices;
    const char* listed = std::getenv("CUDA_VISIBLE_DEVICES");
    if (listed == nullptr) {
      for (int index = 0; index < settings().num_devices; index++) devices.push_back(index);
      return devices;
    }
    std::stringstream entries{std::string(listed)};
    for (std::string entry; std::getline(entries, entry, ',');) {
      char* end = nullptr;
      long index = std::strtol(entry.c_str(), &end, 10);
      // As CUDA does: what follows an entry that names no device is not seen.
      if (end == entry.c_str() || index < 0 || index >= settings().num_devices) break;
      devices.push_back(static_cast<int>(index));
    }
    return devices;
  }();
  return found;
}

thread_local int the_device = 0;
thread_local bool with_context = false;

}  // namespace

std::string uuid(int physical) {
  std::string bytes(16, 0x51);
  bytes[15] = static_cast<char>(physical);
  return bytes;
}
int num_visible() { return static_cast<int>(visible().size()); }
int physical(int device) { return visible().at(device); }
int current_device() { return the_device; }
bool has_context() { return with_context; }
void make_context() { with_context = true; }
void set_device(int device) {
  the_device = device;
  make_context();
}

// --- memory ----------------------------------------------------------------------------------------------------------

namespace {

struct Arena {
  int fd = -1;
  std::size_t end = 0;
  std::size_t held = 0;
};

struct Memory {
  std::recursive_mutex mutex;
  std::map<std::uintptr_t, Allocation> allocations;  // by base
  std::map<int, Arena> arenas;                       // by device
};
Memory& memory() { return forever<Memory>(); }

// A line of the file in which processes count what they hold.
struct Held {
  int pid, physical;
  std::uint64_t started, bytes;
};

std::uint64_t started_at(int pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(stat, line);
  std::size_t end = line.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(line.substr(end + 2));
  std::string field;
  for (int number = 3; number <= 22 && fields >> field; number++) {
    if (number == 3 && (field == "Z" || field == "X")) return 0;
  }
  return std::strtoull(field.c_str(), nullptr, 10);
}

// Return what others hold of a device and, if it is given, write down what this process does: a file, under a lock.
std::size_t others_hold(int physical_device, std::optional<std::size_t> own) {
  if (settings().state.empty()) return 0;
  int fd = open(settings().state.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) fail("SIMULATED_GPU_STATE cannot be opened: " + settings().state);
  flock(fd, LOCK_EX);
  struct stat status {};
  fstat(fd, &status);
  std::vector<Held> entries(status.st_size / sizeof(Held));
  if (pread(fd, entries.data(), entries.size() * sizeof(Held), 0) < 0) fail("SIMULATED_GPU_STATE cannot be read");
  std::size_t total = 0;
  std::vector<Held> kept;
  for (const Held& entry : entries) {
    bool is_own = entry.pid == getpid() && entry.physical == physical_device;
    if ((is_own && own) || entry.started != started_at(entry.pid)) continue;
    kept.push_back(entry);
    if (entry.physical == physical_device && !is_own) total += entry.bytes;
  }
  if (own) {
    kept.push_back({getpid(), physical_device, started_at(getpid()), *own});
    if (ftruncate(fd, 0) != 0 || pwrite(fd, kept.data(), kept.size() * sizeof(Held), 0) < 0) {
      fail("SIMULATED_GPU_STATE cannot be written");
    }
  }
  close(fd);  // which unlocks it
  return total;
}

}  // namespace

std::size_t rounded(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

std::optional<std::size_t> take(int device, std::size_t bytes) {
  std::lock_guard lock(memory().mutex);
  Arena& arena = memory().arenas[device];
  if (arena.fd < 0) {
    arena.fd = memfd_create("simulated-gpu", MFD_CLOEXEC);
    if (arena.fd < 0) fail("no file for the memory of a device can be made");
  }
  std::size_t used = arena.held + others_hold(physical(device), arena.held);
  if (used + bytes > settings().memory) return std::nullopt;
  std::size_t offset = arena.end;
  if (ftruncate(arena.fd, static_cast<off_t>(arena.end + bytes)) != 0) fail("the memory of a device cannot grow");
  arena.end += bytes;
  arena.held += bytes;
  others_hold(physical(device), arena.held);
  return offset;
}

void give(int device, std::size_t offset, std::size_t bytes) {
  std::lock_guard lock(memory().mutex);
  Arena& arena = memory().arenas[device];
  fallocate(arena.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  arena.held -= bytes;
  others_hold(physical(device), arena.held);
}

char* reserve(std::size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

bool map(char* at, std::size_t bytes, int device, std::size_t offset) {
  std::lock_guard lock(memory().mutex);
  int fd = memory().arenas[device].fd;
  return mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) != MAP_FAILED;
}

// The addresses stay reserved, so that nothing else comes to lie where somebody may still look.
void unmap(char* at, std::size_t bytes) {
  mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

char* allocate(int device, std::size_t bytes) {
  std::size_t whole = rounded(std::max<std::size_t>(bytes, 1));
  std::optional<std::size_t> offset = take(device, whole);
  if (!offset) return nullptr;
  char* at = reserve(whole);
  if (at == nullptr || !map(at, whole, device, *offset)) fail("the memory of a device cannot be mapped");
  note({at, whole, device, Kind::device, *offset});
  return at;
}

char* allocate_pinned(std::size_t bytes) {
  std::size_t whole = rounded(std::max<std::size_t>(bytes, 1));
  void* at = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  note({static_cast<char*>(at), whole, current_device(), Kind::pinned, 0});
  return static_cast<char*>(at);
}

void register_pinned(char* base, std::size_t bytes) { note({base, bytes, current_device(), Kind::pinned, 0}); }

void note(const Allocation& allocation) {
  std::lock_guard lock(memory().mutex);
  memory().allocations[reinterpret_cast<std::uintptr_t>(allocation.base)] = allocation;
}

bool release(const void* base) {
  std::unique_lock lock(memory().mutex);
  auto found = memory().allocations.find(reinterpret_cast<std::uintptr_t>(base));
  if (found == memory().allocations.end()) return false;
  Allocation allocation = found->second;
  memory().allocations.erase(found);
  if (allocation.kind == Kind::device) {
    unmap(allocation.base, allocation.bytes);
    give(allocation.device, allocation.offset, allocation.bytes);
  } else if (allocation.kind == Kind::imported) {
    unmap(allocation.base, allocation.bytes);
  }
  return true;
}

void forget(const void* base) {
  std::lock_guard lock(memory().mutex);
  memory().allocations.erase(reinterpret_cast<std::uintptr_t>(base));
}

std::optional<Allocation> find(const void* address) {
  std::lock_guard lock(memory().mutex);
  auto after = memory().allocations.upper_bound(reinterpret_cast<std::uintptr_t>(address));
  if (after == memory().allocations.begin()) return std::nullopt;
  const Allocation& allocation = std::prev(after)->second;
  if (static_cast<const char*>(address) >= allocation.base + allocation.bytes) return std::nullopt;
  return allocation;
}

std::size_t bytes_used_of(int physical_device) {
  std::lock_guard lock(memory().mutex);
  std::size_t own = 0;
  for (auto& [device, arena] : memory().arenas) {
    if (physical(device) == physical_device) own += arena.held;
  }
  return own + others_hold(physical_device, std::nullopt);
}

constexpr char MAGIC[8] = "simgpu1";

Handle export_memory(const Allocation& allocation) {
  Handle handle{};
  std::memcpy(handle.magic, MAGIC, sizeof(MAGIC));
  std::lock_guard lock(memory().mutex);
  handle.pid = getpid();
  handle.fd = memory().arenas[allocation.device].fd;
  handle.physical = physical(allocation.device);
  handle.offset = allocation.offset;
  handle.bytes = allocation.bytes;
  return handle;
}

char* import_memory(const Handle& handle, int device) {
  if (std::memcmp(handle.magic, MAGIC, sizeof(MAGIC)) != 0) return nullptr;
  std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* at = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(handle.offset));
  close(fd);
  if (at == MAP_FAILED) return nullptr;
  note({static_cast<char*>(at), handle.bytes, device, Kind::imported, 0});
  note_carried("ipc", handle.bytes);
  return static_cast<char*>(at);
}

// --- streams and events ----------------------------------------------------------------------------------------------

namespace {

// How often something is asked whether it is done, until that counts as waiting for it: who asks in a loop does wait, who
// asks now and then, as the allocator and NCCL's watchdog do, does not.
constexpr int MOST_ASKED = 50;

// Lets other threads of Python go on while this one waits: what it waits for may be a kernel that Triton interprets.
class WithoutPython {
 public:
  WithoutPython() {
    static auto holds = symbol<int()>("PyGILState_Check");
    static auto is_ending = symbol<int()>("_Py_IsFinalizing");
    static auto save = symbol<void*()>("PyEval_SaveThread");
    if (!settings().is_late || holds == nullptr || save == nullptr) return;
    if ((is_ending == nullptr || is_ending() == 0) && holds() != 0) saved_ = save();
  }
  ~WithoutPython() {
    static auto restore = symbol<void(void*)>("PyEval_RestoreThread");
    if (saved_ != nullptr) restore(saved_);
  }

 private:
  template <typename Function>
  static Function* symbol(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  }
  void* saved_ = nullptr;
};

}  // namespace

class Stream {
 public:
  explicit Stream(int device) : device(device) {}

  std::uint64_t enqueue(std::function<void()> work, bool waits) {
    std::unique_lock lock(mutex_);
    std::uint64_t number = ++num_queued_;
    if (!settings().is_late && !waits && num_done_ + 1 == number) {
      lock.unlock();
      work();
      lock.lock();
      finish(number);
      return number;
    }
    tasks_.push_back({std::move(work), number});
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    changed_.notify_all();
    return number;
  }

  void want(std::uint64_t number) {
    std::lock_guard lock(mutex_);
    num_wanted_ = std::max(num_wanted_, number);
    changed_.notify_all();
  }

  void wait_for(std::uint64_t number) {
    if (has_done(number)) return;
    want(number);
    WithoutPython without;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_done_ >= number; });
  }

  std::uint64_t last() {
    std::lock_guard lock(mutex_);
    return num_queued_;
  }

  bool has_done(std::uint64_t number) {
    std::lock_guard lock(mutex_);
    return num_done_ >= number;
  }

  // Return whether it is done; `num_asked` are those that asked before.
  bool ask(std::uint64_t number, std::atomic<int>& num_asked) {
    bool is_done = has_done(number);
    if (!is_done && ++num_asked >= MOST_ASKED) want(number);
    return is_done;
  }

  bool is_idle() {
    std::uint64_t number = last();
    bool is_idle = ask(number, num_asked_);
    if (is_idle) num_asked_ = 0;
    return is_idle;
  }

  const int device;

 private:
  struct Task {
    std::function<void()> work;
    std::uint64_t number;
  };

  void finish(std::uint64_t number) {
    num_done_ = number;
    changed_.notify_all();
  }

  [[noreturn]] void run() {
    set_device(device);
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] {
        return !tasks_.empty() && num_done_ + 1 == tasks_.front().number &&
               (!settings().is_late || tasks_.front().number <= num_wanted_);
      });
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task.work();
      task.work = nullptr;
      lock.lock();
      finish(task.number);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::uint64_t num_queued_ = 0, num_done_ = 0;
  std::uint64_t num_wanted_ = 0;  // what is late runs up to here
  std::atomic<int> num_asked_{0};
  bool has_thread_ = false;
};

namespace {

struct Streams {
  std::mutex mutex;
  std::map<int, Stream*> defaults;  // by device
  std::map<int, std::vector<Stream*>> of_device;
};
Streams& streams() { return forever<Streams>(); }

}  // namespace

Stream* new_stream(int device) {
  std::lock_guard lock(streams().mutex);
  return streams().of_device[device].emplace_back(new Stream(device));  // kept: a few for each device
}

Stream* stream_of(void* handle, int device) {
  if (reinterpret_cast<std::uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
  {
    std::lock_guard lock(streams().mutex);
    if (auto found = streams().defaults.find(device); found != streams().defaults.end()) return found->second;
  }
  Stream* made = new_stream(device);
  std::lock_guard lock(streams().mutex);
  return streams().defaults.emplace(device, made).first->second;
}

int device_of(Stream* stream) { return stream->device; }

std::uint64_t enqueue(Stream* stream, std::function<void()> work, bool waits) {
  return stream->enqueue(std::move(work), waits);
}

void want(Stream* stream, std::uint64_t number) { stream->want(number); }

void synchronize(Stream* stream) { stream->wait_for(stream->last()); }

void synchronize_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard lock(streams().mutex);
    all = streams().of_device[device];
  }
  for (Stream* stream : all) synchronize(stream);
}

bool is_idle(Stream* stream) { return stream->is_idle(); }

class Event {
 public:
  struct Mark {
    Stream* stream = nullptr;
    std::uint64_t number = 0;
    Clock::time_point at;
    std::atomic<int> num_asked{0};
  };

  std::shared_ptr<Mark> mark() {
    std::lock_guard lock(mutex_);
    return mark_;
  }

  void set(std::shared_ptr<Mark> mark) {
    std::lock_guard lock(mutex_);
    mark_ = std::move(mark);
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> mark_;  // of the last record; none yet: it is done
};

Event* new_event() { return new Event(); }
void delete_event(Event* event) { delete event; }

void record(Event* event, Stream* stream) {
  auto mark = std::make_shared<Event::Mark>();
  mark->stream = stream;
  mark->number = stream->enqueue([mark] { mark->at = Clock::now(); }, false);
  event->set(mark);
}

bool is_done(Event* event) {
  auto mark = event->mark();
  return mark == nullptr || mark->stream->ask(mark->number, mark->num_asked);
}

void synchronize(Event* event) {
  if (auto mark = event->mark()) mark->stream->wait_for(mark->number);
}

void wait(Stream* stream, Event* event) {
  auto mark = event->mark();
  if (mark == nullptr || mark->stream == stream || mark->stream->has_done(mark->number)) return;
  stream->enqueue([mark] { mark->stream->wait_for(mark->number); }, true);
}

double milliseconds(Event* from, Event* to) {
  auto first = from->mark(), last = to->mark();
  if (first == nullptr || last == nullptr) return 0;
  return std::chrono::duration<double, std::milli>(last->at - first->at).count();
}

}  // namespace simulated
