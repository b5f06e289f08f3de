// How many threads torch's operators use on the thread that calls them.
#pragma once

namespace muster {

/// at::set_num_threads, which two threads of a forked child must not call at once: there it makes torch's thread pool
/// anew without a lock, and one of the two throws "Invalid thread pool!" (torch 2.13, caffe2::pthreadpool).
void set_intra_op_threads(int threads);

/// As set_intra_op_threads(threads) for the calling thread, while threads that have not used torch yet will have
/// `elsewhere`: torch gives those what was set last, on whichever thread.
void set_intra_op_threads_here(int threads, int elsewhere);

/// While it lives, the calling thread uses this many intra-op threads.
class IntraOpThreads {
 public:
  explicit IntraOpThreads(int threads);
  ~IntraOpThreads();
  IntraOpThreads(const IntraOpThreads&) = delete;
  IntraOpThreads& operator=(const IntraOpThreads&) = delete;

 private:
  int previous_;
};

}  // namespace muster
