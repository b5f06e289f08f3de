// The functions of NCCL and CUDA that the NCCL backend calls, as tables over opaque handles. The backend is compiled
// and tested in every build, against fakes of these tables; nccl_api.cpp and cuda_device.cpp fill the real ones.
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/log.h"
#include "kernels/kernels.h"

namespace muster::comm::nccl {

using Comm = void*;    ///< ncclComm_t
using Window = void*;  ///< ncclWindow_t
using Stream = void*;  ///< cudaStream_t
using Event = void*;   ///< cudaEvent_t

/// ncclResult_t; every other value is an error.
using Status = int;
inline constexpr Status kSuccess = 0;
inline constexpr Status kInProgress = 7;

/// The values of ncclDataType_t and ncclRedOp_t.
enum class DataType : int { i8 = 0, u8 = 1, i32 = 2, i64 = 4, f16 = 6, f32 = 7, f64 = 8, bf16 = 9 };
enum class Reduction : int { sum = 0, max = 2, min = 3 };

/// Instead of a root.
inline constexpr int kEveryRank = -1;

using UniqueId = std::array<char, 128>;

/// NCCL, with sizes in bytes where no arithmetic is done. Calls on a communicator are made on its device, and may
/// return kInProgress: then nothing else may be asked of it until async_error says otherwise. What comes from `split`
/// does not: its calls block until they are through, or until it is aborted.
struct NcclApi {
  template <class... Arguments>
  using Call = std::function<Status(Arguments...)>;

  Call<UniqueId*> get_unique_id;
  /// With blocking = 0. max_ctas: blocks of the device that an operation uses at most; 0: as many as NCCL chooses.
  Call<Comm*, int /*size*/, const UniqueId&, int /*rank*/, int /*max_ctas*/> start;
  /// All ranks, with blocking = 1; empty where there are no such.
  Call<Comm, int /*rank*/, Comm*> split;
  Call<Comm, Status*> async_error;
  Call<Comm> finalize;
  Call<Comm> destroy;
  Call<Comm> abort;  ///< frees it too
  Call<> group_start;
  Call<> group_end;

  Call<void**, size_t> allocate;
  Call<void*> free;
  Call<Comm, void*, size_t, Window*> register_window;  ///< empty where the version has no windows
  Call<Comm, Window> deregister_window;

  template <class... Arguments>
  using Collective = Call<Arguments..., Comm, Stream>;

  /// To one rank, or to kEveryRank.
  Collective<const void*, void*, size_t /*count*/, DataType, Reduction, int /*root*/> reduce;
  Collective<const void*, void*, size_t /*count received*/, DataType, Reduction> reduce_scatter;
  Collective<const void*, void*, size_t, int /*root*/> broadcast;
  Collective<const void*, void*, size_t /*sent*/> all_gather;
  Collective<const void*, size_t, int /*peer*/> send;
  Collective<void*, size_t, int /*peer*/> receive;

  /// NCCL's text for the status and its last error; the communicator may be null.
  std::function<std::string(Status, Comm)> describe;
};

/// CUDA: streams and events of the device that is current, unless said otherwise, and what is enqueued on them.
/// Everything but destruction throws CommError with CUDA's text.
struct DeviceApi {
  std::function<int(int)> exchange_device;  ///< returns what was current
  /// Makes it current once it is used: a process has a context on those of its devices alone.
  std::function<void(int)> restore_device;
  /// As NCCL tells GPUs apart; of one that ranks may share it is empty. Null where they may share any.
  std::function<std::string(int)> identity;
  std::function<Stream(int)> current_stream;    ///< the calling thread's, of a device
  std::function<bool(Stream)> is_capturing;     ///< into a graph
  std::function<void()> permit_during_capture;  ///< the calling thread may query events while others capture
  std::function<Stream()> create_stream;        ///< that waits for no other by itself
  std::function<void(Stream)> destroy_stream;
  std::function<Event()> create_event;
  std::function<void(Event)> destroy_event;
  std::function<void(Event, Stream)> record;
  std::function<void(Stream, Event)> stream_wait;
  std::function<bool(Event)> query;  ///< whether the stream has passed it
  std::function<void()> synchronize;
  std::function<void()> release_cached;  ///< gives back memory of the device that torch keeps and nobody uses
  /// What torch enqueues in `function` goes to the stream, which is one of the device; both are current meanwhile. The
  /// function owns what it uses: it may run as late as the stream gets there.
  std::function<void(Stream, int /*device*/, std::function<void()>)> with_stream;
  std::function<void(void* /*to*/, int /*device*/, const void* /*from*/, int /*device*/, size_t /*bytes*/, Stream)>
      copy;
  /// kernels::cuda::tree_sum.
  std::function<void(kernels::DType, const std::vector<const void*>& /*sources*/,
                     const std::vector<void*>& /*destinations*/, size_t /*elements*/, Stream)>
      tree_sum;
  std::function<void(const char*)> push_range;  ///< for profilers
  std::function<void()> pop_range;
};

/// Makes `device` current while it lives.
class DeviceScope {
 public:
  DeviceScope(const DeviceApi& api, int device) : api_(api), previous_(api.exchange_device(device)) {}
  ~DeviceScope() {
    try {
      api_.restore_device(previous_);
    } catch (const std::exception& error) {  // whatever is called next fails too, and throws
      log(LogLevel::debug, std::string("the current CUDA device could not be restored: ") + error.what());
    }
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const DeviceApi& api_;
  const int previous_;
};

}  // namespace muster::comm::nccl
