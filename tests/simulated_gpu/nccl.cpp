// NCCL between processes of one machine: messages cross sockets, and a thread of the stream carries them.
//
// What the real library does when something goes wrong, this does: a peer that is gone is not noticed, so that what
// waits for it waits until `ncclCommAbort`; a communicator that is made without `blocking = 0` waits for all its ranks.
//
// Where what is queued runs as late as may be, an operation runs when it is awaited here, or when a rank that takes part
// has begun it, which tells the others: there it may be awaited by what this rank's host waits for in turn.
#include <nccl.h>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device.h"

using namespace simulated;

// Operations that are queued together on one stream.
struct Batch {
  simulated::Stream* stream = nullptr;
  std::uint64_t number = 0;           // of the communicator's
  std::uint64_t task = 0;             // of the stream's
  std::vector<std::uint64_t> before;  // by peer: messages between the two that are queued before it
  std::vector<std::uint64_t> own;     // by peer: its own
};

struct ncclComm {
  std::string name;  // the same for all ranks
  int rank = 0, num_ranks = 1, device = 0;
  std::vector<int> sockets;  // by peer
  std::atomic<bool> is_aborted{false};
  std::atomic<ncclResult_t> state{ncclInProgress};
  std::atomic<int> num_running{0};
  std::mutex mutex;
  std::condition_variable has_carried;
  std::uint64_t num_queued = 0, num_carried = 0;
  int num_splits = 0;

  // Of use only where what is queued is late.
  int listening = -1;                  // where peers tell of what they have begun
  std::vector<std::uint64_t> queued;   // messages with each peer
  std::vector<std::uint64_t> begun;    // as many of these as the peer has begun
  std::deque<Batch> waiting;           // not carried yet

  ~ncclComm() {
    if (listening >= 0) close(listening);
    for (int socket : sockets) {
      if (socket >= 0) close(socket);
    }
  }
};

namespace {

using Comm = std::shared_ptr<ncclComm>;

std::mutex mutex;
std::map<ncclComm*, Comm>& comms() {
  static auto* found = new std::map<ncclComm*, Comm>();
  return *found;
}

Comm comm_of(ncclComm_t comm) {
  std::lock_guard lock(mutex);
  auto found = comms().find(comm);
  return found == comms().end() ? nullptr : found->second;
}

// --- connecting ------------------------------------------------------------------------------------------------------

socklen_t address_of(const std::string& name, int rank, sockaddr_un* address, const char* what = "") {
  std::string path = "simulated-nccl/" + name + "/" + std::to_string(rank) + what;
  *address = {};
  address->sun_family = AF_UNIX;  // an abstract name: no file that could be left
  std::memcpy(address->sun_path + 1, path.data(), path.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
}

struct Begun {
  int rank;
  std::uint64_t num_messages;
};

// Have a batch run if a peer has begun what it is for.
void want_if_begun(const ncclComm& comm, const Batch& batch) {
  bool is_begun = false;
  for (int peer = 0; peer < comm.num_ranks; peer++) is_begun |= batch.before[peer] < comm.begun[peer];
  if (is_begun && batch.task != 0) want(batch.stream, batch.task);
}

void listen_to_peers(const Comm& comm) {
  while (!comm->is_aborted) {
    pollfd awaited{comm->listening, POLLIN, 0};
    if (poll(&awaited, 1, 20) <= 0) continue;
    Begun told;
    if (recv(comm->listening, &told, sizeof told, 0) != sizeof told) continue;
    std::lock_guard lock(comm->mutex);
    comm->begun[told.rank] = std::max(comm->begun[told.rank], told.num_messages);
    for (const Batch& batch : comm->waiting) want_if_begun(*comm, batch);
  }
}

void tell_peers(const Comm& comm, const Batch& batch) {
  for (int peer = 0; peer < comm->num_ranks; peer++) {
    if (peer == comm->rank || batch.own[peer] == 0) continue;
    Begun told{comm->rank, batch.before[peer] + batch.own[peer]};
    sockaddr_un address;
    socklen_t size = address_of(comm->name, peer, &address, "/begun");
    auto* to = reinterpret_cast<sockaddr*>(&address);
    while (sendto(comm->listening, &told, sizeof told, MSG_NOSIGNAL | MSG_DONTWAIT, to, size) < 0 &&
           (errno == EAGAIN || errno == EINTR) && !comm->is_aborted) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void want_all_before(const ncclComm& comm, std::uint64_t number) {
  for (const Batch& batch : comm.waiting) {
    if (batch.number < number && batch.task != 0) want(batch.stream, batch.task);
  }
}

void connect_all(const Comm& comm) {
  comm->sockets.assign(comm->num_ranks, -1);
  sockaddr_un address;
  if (settings().is_late) {
    comm->listening = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    socklen_t size = address_of(comm->name, comm->rank, &address, "/begun");
    if (bind(comm->listening, reinterpret_cast<sockaddr*>(&address), size) != 0) {
      fail("rank " + std::to_string(comm->rank) + " of a communicator of NCCL exists already");
    }
    std::thread([comm] { listen_to_peers(comm); }).detach();
  }
  socklen_t size = address_of(comm->name, comm->rank, &address);
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 128) != 0) {
    fail("rank " + std::to_string(comm->rank) + " of a communicator of NCCL exists already");
  }
  for (int peer = 0; peer < comm->rank; peer++) {
    while (!comm->is_aborted) {
      int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      size = address_of(comm->name, peer, &address);
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
          send(fd, &comm->rank, sizeof(int), MSG_NOSIGNAL) == sizeof(int)) {
        comm->sockets[peer] = fd;
        break;
      }
      close(fd);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  for (int missing = comm->num_ranks - 1 - comm->rank; missing > 0 && !comm->is_aborted;) {
    pollfd awaited{listener, POLLIN, 0};
    if (poll(&awaited, 1, 20) <= 0) continue;
    int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), peer = -1;
    if (recv(fd, &peer, sizeof peer, MSG_WAITALL) != sizeof peer) {
      close(fd);
      continue;
    }
    comm->sockets[peer] = fd;
    missing--;
  }
  close(listener);
  comm->state = comm->is_aborted ? ncclInternalError : ncclSuccess;
}

ncclResult_t start(ncclComm_t* made, const std::string& name, int rank, int num_ranks, int device, bool blocking) {
  auto comm = std::make_shared<ncclComm>();
  comm->name = name;
  comm->rank = rank;
  comm->num_ranks = num_ranks;
  comm->device = device;
  comm->queued.assign(num_ranks, 0);
  comm->begun.assign(num_ranks, 0);
  {
    std::lock_guard lock(mutex);
    comms()[comm.get()] = comm;
  }
  *made = comm.get();
  if (!blocking) {
    std::thread([comm] { connect_all(comm); }).detach();
    return ncclInProgress;
  }
  connect_all(comm);
  return comm->state;
}

// --- carrying --------------------------------------------------------------------------------------------------------

struct Message {
  char* at;
  std::uint64_t bytes;
  std::uint64_t done = 0;      // of header and bytes
  std::uint64_t expected = 0;  // what the header said
};

// All sends and receives go on at the same time; those between the same two ranks in order.
class Exchange {
 public:
  explicit Exchange(const Comm& comm) : comm_(comm), sends_(comm->num_ranks), receives_(comm->num_ranks) {}

  void send(int peer, const void* from, std::size_t bytes) {
    sends_[peer].push_back({static_cast<char*>(const_cast<void*>(from)), bytes});
  }
  void receive(int peer, void* to, std::size_t bytes) { receives_[peer].push_back({static_cast<char*>(to), bytes}); }

  // Return whether everything has come and gone; not if the communicator is aborted.
  bool run() {
    auto &own = sends_[comm_->rank], &back = receives_[comm_->rank];
    for (; !own.empty() && !back.empty(); own.pop_front(), back.pop_front()) {
      if (own.front().bytes != back.front().bytes) fail("a rank sends itself a message of another size");
      std::memmove(back.front().at, own.front().at, own.front().bytes);
    }
    while (!comm_->is_aborted) {
      std::vector<pollfd> awaited;
      bool is_done = true;
      for (int peer = 0; peer < comm_->num_ranks; peer++) {
        short events = (sends_[peer].empty() ? 0 : POLLOUT) | (receives_[peer].empty() ? 0 : POLLIN);
        if (events == 0) continue;
        is_done = false;
        if (comm_->sockets[peer] < 0) continue;  // it is gone: nobody says so
        if ((events & POLLOUT) != 0) push(peer);
        if ((events & POLLIN) != 0) pull(peer);
        events = (sends_[peer].empty() ? 0 : POLLOUT) | (receives_[peer].empty() ? 0 : POLLIN);
        if (events != 0 && comm_->sockets[peer] >= 0) awaited.push_back({comm_->sockets[peer], events, 0});
      }
      if (is_done) return true;
      if (awaited.empty()) {
        bool is_left = false;
        for (int peer = 0; peer < comm_->num_ranks; peer++) is_left |= !sends_[peer].empty() || !receives_[peer].empty();
        if (is_left) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      } else {
        poll(awaited.data(), awaited.size(), 20);
      }
    }
    return false;
  }

 private:
  void lose(int peer) {
    close(comm_->sockets[peer]);
    comm_->sockets[peer] = -1;
  }

  void push(int peer) {
    while (!sends_[peer].empty()) {
      Message& message = sends_[peer].front();
      bool is_header = message.done < sizeof(std::uint64_t);
      const char* at = is_header ? reinterpret_cast<char*>(&message.bytes) + message.done
                                 : message.at + (message.done - sizeof(std::uint64_t));
      std::size_t left = (is_header ? sizeof(std::uint64_t) : sizeof(std::uint64_t) + message.bytes) - message.done;
      if (left > 0) {
        ssize_t sent = ::send(comm_->sockets[peer], at, left, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (sent < 0 && errno == EFAULT) fail("NCCL sends memory that is not mapped");
        if (sent < 0) return lose(peer);
        message.done += static_cast<std::uint64_t>(sent);
      }
      if (message.done == sizeof(std::uint64_t) + message.bytes) sends_[peer].pop_front();
    }
  }

  void pull(int peer) {
    while (!receives_[peer].empty()) {
      Message& message = receives_[peer].front();
      bool is_header = message.done < sizeof(std::uint64_t);
      char* at = is_header ? reinterpret_cast<char*>(&message.expected) + message.done
                           : message.at + (message.done - sizeof(std::uint64_t));
      std::size_t left = (is_header ? sizeof(std::uint64_t) : sizeof(std::uint64_t) + message.bytes) - message.done;
      if (left > 0) {
        ssize_t got = recv(comm_->sockets[peer], at, left, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (got < 0 && errno == EFAULT) fail("NCCL receives into memory that is not mapped");
        if (got <= 0) return lose(peer);
        message.done += static_cast<std::uint64_t>(got);
      }
      if (message.done == sizeof(std::uint64_t) && message.expected != message.bytes) {
        fail("rank " + std::to_string(comm_->rank) + " awaits " + std::to_string(message.bytes) + " bytes of rank " +
             std::to_string(peer) + ", which sends " + std::to_string(message.expected));
      }
      if (message.done == sizeof(std::uint64_t) + message.bytes) receives_[peer].pop_front();
    }
  }

  Comm comm_;
  std::vector<std::deque<Message>> sends_, receives_;  // by peer
};

// --- adding up -------------------------------------------------------------------------------------------------------

float from_bfloat16(std::uint16_t bits) {
  std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
std::uint16_t to_bfloat16(float value) {
  if (std::isnan(value)) return 0x7fc0;
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float from_float16(std::uint16_t bits) {
  int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  float size = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
               : exponent == 31 ? (mantissa != 0 ? NAN : INFINITY)
                                : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}
std::uint16_t to_float16(float value) {
  std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float size = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 6.103515625e-05f) return sign | static_cast<std::uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  int exponent;
  float mantissa = std::frexp(size, &exponent);  // 0.5 to 1
  auto rounded = static_cast<int>(std::nearbyint(std::ldexp(mantissa, 11)));
  return sign | static_cast<std::uint16_t>(((exponent + 14) << 10) + (rounded - 1024));
}

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

template <typename T>
T combined(T left, T right, ncclRedOp_t how) {
  switch (how) {
    case ncclSum: case ncclAvg: return left + right;
    case ncclProd: return left * right;
    case ncclMax: return std::max(left, right);
    case ncclMin: return std::min(left, right);
    default: missing("an operation of ncclRedOpCreatePreMulSum");
  }
}

// Of sixteen bits in float32, rounded once; the ranks in order, so that all have the same.
template <typename Bits, typename T, typename From, typename To>
void reduce_as(char* to, const std::vector<const char*>& parts, std::size_t count, ncclRedOp_t how, From from, To back) {
  for (std::size_t index = 0; index < count; index++) {
    T total = from(reinterpret_cast<const Bits*>(parts[0])[index]);
    for (std::size_t rank = 1; rank < parts.size(); rank++) {
      total = combined<T>(total, from(reinterpret_cast<const Bits*>(parts[rank])[index]), how);
    }
    if (how == ncclAvg) total = total / static_cast<T>(parts.size());
    reinterpret_cast<Bits*>(to)[index] = back(total);
  }
}

template <typename T>
void reduce_plain(char* to, const std::vector<const char*>& parts, std::size_t count, ncclRedOp_t how) {
  auto same = [](T value) { return value; };
  reduce_as<T, T>(to, parts, count, how, same, same);
}

void reduce(char* to, const std::vector<const char*>& parts, std::size_t count, ncclDataType_t type, ncclRedOp_t how) {
  switch (type) {
    case ncclInt8: return reduce_plain<std::int8_t>(to, parts, count, how);
    case ncclUint8: return reduce_plain<std::uint8_t>(to, parts, count, how);
    case ncclInt32: return reduce_plain<std::int32_t>(to, parts, count, how);
    case ncclUint32: return reduce_plain<std::uint32_t>(to, parts, count, how);
    case ncclInt64: return reduce_plain<std::int64_t>(to, parts, count, how);
    case ncclUint64: return reduce_plain<std::uint64_t>(to, parts, count, how);
    case ncclFloat32: return reduce_plain<float>(to, parts, count, how);
    case ncclFloat64: return reduce_plain<double>(to, parts, count, how);
    case ncclFloat16: return reduce_as<std::uint16_t, float>(to, parts, count, how, from_float16, to_float16);
    case ncclBfloat16: return reduce_as<std::uint16_t, float>(to, parts, count, how, from_bfloat16, to_bfloat16);
    default: missing("a sum of this type in NCCL");
  }
}

// --- operations ------------------------------------------------------------------------------------------------------

enum class What { send, receive, all_gather, all_reduce, reduce_scatter, broadcast, reduce, all_to_all };

struct Operation {
  What what;
  const char* from;
  char* to;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t how;
  int peer;  // or the root
  std::vector<char> room;

  std::size_t bytes() const { return count * size_of(type); }
};

void prepare(Operation& operation, Exchange& exchange, const ncclComm& comm) {
  std::size_t bytes = operation.bytes();
  int num_ranks = comm.num_ranks;
  bool is_root = comm.rank == operation.peer;
  switch (operation.what) {
    case What::send: exchange.send(operation.peer, operation.from, bytes); break;
    case What::receive: exchange.receive(operation.peer, operation.to, bytes); break;
    case What::all_gather:
      for (int peer = 0; peer < num_ranks; peer++) {
        exchange.send(peer, operation.from, bytes);
        exchange.receive(peer, operation.to + peer * bytes, bytes);
      }
      break;
    case What::all_to_all:
      for (int peer = 0; peer < num_ranks; peer++) {
        exchange.send(peer, operation.from + peer * bytes, bytes);
        exchange.receive(peer, operation.to + peer * bytes, bytes);
      }
      break;
    case What::all_reduce:
    case What::reduce_scatter:
      operation.room.resize(bytes * num_ranks);
      for (int peer = 0; peer < num_ranks; peer++) {
        exchange.send(peer, operation.from + (operation.what == What::all_reduce ? 0 : peer * bytes), bytes);
        exchange.receive(peer, operation.room.data() + peer * bytes, bytes);
      }
      break;
    case What::reduce:
      if (is_root) operation.room.resize(bytes * num_ranks);
      exchange.send(operation.peer, operation.from, bytes);
      for (int peer = 0; is_root && peer < num_ranks; peer++) {
        exchange.receive(peer, operation.room.data() + peer * bytes, bytes);
      }
      break;
    case What::broadcast:
      for (int peer = 0; is_root && peer < num_ranks; peer++) exchange.send(peer, operation.from, bytes);
      exchange.receive(operation.peer, operation.to, bytes);
      break;
  }
}

void finish(Operation& operation, const ncclComm& comm) {
  if (operation.room.empty()) return;
  std::vector<const char*> parts;
  for (int peer = 0; peer < comm.num_ranks; peer++) parts.push_back(operation.room.data() + peer * operation.bytes());
  reduce(operation.to, parts, operation.count, operation.type, operation.how);
}

// Operations of one communicator go one after the other, in the order in which they were queued, whatever their streams.
template <typename Work>
void in_order(const Comm& comm, std::uint64_t number, Work work) {
  std::unique_lock lock(comm->mutex);
  want_all_before(*comm, number);
  comm->has_carried.wait(lock, [&] { return comm->num_carried == number; });
  lock.unlock();
  work();
  lock.lock();
  comm->num_carried++;
  comm->has_carried.notify_all();
}

void want_all(const Comm& comm) {
  std::lock_guard lock(comm->mutex);
  want_all_before(*comm, comm->num_queued);
}

Batch begin(const Comm& comm, std::uint64_t number) {
  std::lock_guard lock(comm->mutex);
  auto found = std::find_if(
      comm->waiting.begin(), comm->waiting.end(), [&](const Batch& batch) { return batch.number == number; });
  Batch batch = std::move(*found);
  comm->waiting.erase(found);
  return batch;
}

void carry(const Comm& comm, std::uint64_t number, std::vector<Operation>& operations) {
  while (comm->state == ncclInProgress && !comm->is_aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Batch batch = begin(comm, number);
  in_order(comm, number, [&] {
    if (settings().is_late) tell_peers(comm, batch);
    Exchange exchange(comm);
    for (Operation& operation : operations) prepare(operation, exchange, *comm);
    if (exchange.run()) {
      for (Operation& operation : operations) {
        finish(operation, *comm);
        if (operation.what == What::send) note_carried("nccl", operation.bytes());
      }
    }
  });
  comm->num_running--;
}

// Count the messages that an operation has with each peer; both ranks count the same.
void count(const Operation& operation, const ncclComm& comm, std::vector<std::uint64_t>& by_peer) {
  bool is_for_all = operation.what == What::all_gather || operation.what == What::all_to_all ||
                    operation.what == What::all_reduce || operation.what == What::reduce_scatter ||
                    ((operation.what == What::reduce || operation.what == What::broadcast) &&
                     comm.rank == operation.peer);
  for (int peer = 0; peer < comm.num_ranks; peer++) by_peer[peer] += is_for_all || peer == operation.peer;
}

void put(const Comm& comm, Stream* stream, std::shared_ptr<std::vector<Operation>> operations) {
  comm->num_running++;
  std::lock_guard lock(comm->mutex);
  Batch batch{stream, comm->num_queued++, 0, comm->queued, std::vector<std::uint64_t>(comm->num_ranks, 0)};
  for (const Operation& operation : *operations) count(operation, *comm, batch.own);
  for (int peer = 0; peer < comm->num_ranks; peer++) comm->queued[peer] += batch.own[peer];
  comm->waiting.push_back(batch);
  std::uint64_t number = batch.number;
  comm->waiting.back().task =
      enqueue(stream, [comm, number, operations] { carry(comm, number, *operations); }, true);
  want_if_begun(*comm, comm->waiting.back());
}

struct Queued {
  Comm comm;
  Stream* stream;
  Operation operation;
};
thread_local int depth = 0;
thread_local std::vector<Queued> queued;

void flush() {
  std::vector<Queued> all = std::move(queued);
  queued.clear();
  while (!all.empty()) {  // those of one communicator and stream together
    Comm comm = all.front().comm;
    Stream* stream = all.front().stream;
    auto operations = std::make_shared<std::vector<Operation>>();
    std::vector<Queued> others;
    for (Queued& each : all) {
      if (each.comm == comm && each.stream == stream) {
        operations->push_back(std::move(each.operation));
      } else {
        others.push_back(std::move(each));
      }
    }
    all = std::move(others);
    put(comm, stream, operations);
  }
}

ncclResult_t queue(
    What what, const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t how, int peer,
    ncclComm_t handle, cudaStream_t stream) {
  Comm comm = comm_of(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  if (how >= ncclNumOps) missing("an operation of ncclRedOpCreatePreMulSum");
  Stream* on = stream_of(stream, comm->device);
  queued.push_back(
      {comm, on, {what, static_cast<const char*>(from), static_cast<char*>(to), count, type, how, peer, {}}});
  if (depth == 0) flush();
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : result == ncclInProgress ? "in progress" : "an error of the simulated NCCL";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  unsigned char random[16];
  std::ifstream("/dev/urandom").read(reinterpret_cast<char*>(random), sizeof random);
  *id = {};
  for (std::size_t index = 0; index < sizeof random; index++) {
    std::snprintf(id->internal + 2 * index, 3, "%02x", random[index]);
  }
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return start(comm, id.internal, rank, num_ranks, current_device(), config == nullptr || config->blocking != 0);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, num_ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int num_ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(comm, num_ranks, ids[0], rank, config);
}
ncclResult_t ncclCommInitAll(ncclComm_t* made, int num_devices, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_devices; rank++) {
    int device = devices == nullptr ? rank : devices[rank];
    ranks.emplace_back([=] { start(made + rank, id.internal, rank, num_devices, device, true); });
  }
  for (std::thread& rank : ranks) rank.join();
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  Comm comm = comm_of(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  std::vector<std::pair<int, int>> all(comm->num_ranks);
  std::pair<int, int> asked{color, key};
  Exchange exchange(comm);
  for (int peer = 0; peer < comm->num_ranks; peer++) {
    exchange.send(peer, &asked, sizeof asked);
    exchange.receive(peer, &all[peer], sizeof asked);
  }
  bool is_done = false;
  std::unique_lock lock(comm->mutex);
  std::uint64_t number_queued = comm->num_queued++;
  lock.unlock();
  in_order(comm, number_queued, [&] { is_done = exchange.run(); });
  if (!is_done) return ncclInternalError;
  int number = comm->num_splits++;
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, int>> members;  // by key, then rank
  for (int rank = 0; rank < comm->num_ranks; rank++) {
    if (all[rank].first == color) members.emplace_back(all[rank].second, rank);
  }
  std::sort(members.begin(), members.end());
  auto found = std::find(members.begin(), members.end(), std::pair<int, int>{key, comm->rank});
  std::string name = comm->name + "." + std::to_string(number) + "." + std::to_string(color);
  return start(
      made, name, static_cast<int>(found - members.begin()), static_cast<int>(members.size()), comm->device,
      config == nullptr || config->blocking != 0);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
  Comm comm = comm_of(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  *state = comm->state;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  Comm comm = comm_of(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  comm->is_aborted = true;
  want_all(comm);
  std::lock_guard lock(mutex);
  comms().erase(handle);
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  Comm comm = comm_of(handle);
  if (comm != nullptr) want_all(comm);
  while (comm != nullptr && comm->num_running > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  ncclCommFinalize(handle);
  std::lock_guard lock(mutex);
  if (auto found = comms().find(handle); found != comms().end()) found->second->is_aborted = true;  // nobody listens now
  comms().erase(handle);
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  *count = handle->num_ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  *rank = handle->rank;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--depth == 0) flush();
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t on) {
  return queue(What::send, from, nullptr, count, type, ncclSum, peer, comm, on);
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t on) {
  return queue(What::receive, nullptr, to, count, type, ncclSum, peer, comm, on);
}
ncclResult_t ncclAllGather(
    const void* from, void* to, std::size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t on) {
  return queue(What::all_gather, from, to, count, type, ncclSum, 0, comm, on);
}
ncclResult_t ncclAlltoAll(
    const void* from, void* to, std::size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t on) {
  return queue(What::all_to_all, from, to, count, type, ncclSum, 0, comm, on);
}
ncclResult_t ncclAllReduce(
    const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t how, ncclComm_t comm,
    cudaStream_t on) {
  return queue(What::all_reduce, from, to, count, type, how, 0, comm, on);
}
ncclResult_t ncclReduceScatter(
    const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t how, ncclComm_t comm,
    cudaStream_t on) {
  return queue(What::reduce_scatter, from, to, count, type, how, 0, comm, on);
}
ncclResult_t ncclReduce(
    const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t how, int root, ncclComm_t comm,
    cudaStream_t on) {
  return queue(What::reduce, from, to, count, type, how, root, comm, on);
}
ncclResult_t ncclBroadcast(
    const void* from, void* to, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t on) {
  return queue(What::broadcast, from, to, count, type, ncclSum, root, comm, on);
}
ncclResult_t ncclBcast(void* at, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t on) {
  return ncclBroadcast(at, at, count, type, root, comm, on);
}
}
