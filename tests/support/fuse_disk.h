#pragma once
// A file served over /dev/fuse by a process of its own, from that process's memory: a drive that can be pulled (the
// server dies) or hang (it stops), seen by everything above as a real block device once a loop device lies on it. It
// can record what it is given, for what it would hold had the power gone. Needs root; where the machine does not allow
// it the object is not ready, and the test skips itself.
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <span>
#include <string>
#include <vector>

namespace tierflow::testing {

// What a drive was given, in its order; shared with the process that serves the drive.
struct DriveRecord {
  struct Entry {
    bool flush;  // everything before it is on the medium
    std::uint64_t offset, length;
    std::uint64_t data;  // where its bytes begin
  };
  static constexpr std::size_t kEntries = 1 << 16, kBytes = std::size_t{512} << 20;

  std::atomic<std::size_t> entries;
  std::atomic<bool> full;
  std::size_t used;
  Entry entry[kEntries];
  char bytes[kBytes];

  void add(bool flush, std::uint64_t offset = 0, const char* from = nullptr, std::uint64_t length = 0) {
    if (entries == kEntries || length > kBytes - used) full = true;
    if (full) return;
    if (length != 0) std::memcpy(bytes + used, from, length);
    entry[entries] = {flush, offset, length, used};
    used += length;
    ++entries;
  }
};

class FuseDisk {
 public:
  // Served as `folder`/fuse/disk. Make it before the process has threads or locked files: the server is a fork.
  explicit FuseDisk(const std::filesystem::path& folder, std::uint64_t bytes, bool recorded = false)
      : path_(folder / "fuse"),
        bytes_(bytes),
        memory_(static_cast<char*>(shared(bytes))),
        record_(recorded ? static_cast<DriveRecord*>(shared(sizeof(DriveRecord))) : nullptr) {
    if (geteuid() != 0) return;
    std::filesystem::create_directory(path_);
    const int device = ::open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (device < 0) return;
    const std::string options = "fd=" + std::to_string(device) + ",rootmode=40000,user_id=0,group_id=0";
    mounted_ = ::mount("tierflow", path_.c_str(), "fuse", MS_NOSUID | MS_NODEV, options.c_str()) == 0;
    if (mounted_) {
      server_ = fork();
      if (server_ == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        Server(device, bytes, memory_, record_).run();
        _exit(0);
      }
    }
    close(device);  // the server's copy is the only one: with it goes the connection
  }
  ~FuseDisk() {
    pull();
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
    munmap(memory_, bytes_);
    if (record_ != nullptr) munmap(record_, sizeof(DriveRecord));
  }
  FuseDisk(const FuseDisk&) = delete;
  FuseDisk& operator=(const FuseDisk&) = delete;

  bool ready() const { return server_ > 0; }
  const std::filesystem::path& folder() const { return path_; }
  std::filesystem::path file() const { return path_ / "disk"; }
  // What it holds, and what it was given.
  std::span<char> bytes() const { return {memory_, bytes_}; }
  const DriveRecord& record() const { return *record_; }

  // Everything fails from here on, also what is under way.
  void pull() {
    if (server_ <= 0) return;
    kill(server_, SIGKILL);
    waitpid(server_, nullptr, 0);
    server_ = -1;
  }
  // Nothing is answered until answer().
  void hang() const { kill(server_, SIGSTOP); }
  void answer() const { kill(server_, SIGCONT); }

 private:
  // One request at a time. Calls nothing that could need the drive it serves.
  class Server {
   public:
    Server(int device, std::uint64_t bytes, char* memory, DriveRecord* record)
        : device_(device), bytes_(bytes), memory_(memory), record_(record), request_(kMostWrite + 65536) {}

    void run() {
      for (;;) {
        const ssize_t length = read(device_, request_.data(), request_.size());
        if (length < 0 && (errno == EINTR || errno == ENOENT || errno == EAGAIN)) continue;
        if (length < static_cast<ssize_t>(sizeof(fuse_in_header))) return;
        serve(*reinterpret_cast<const fuse_in_header*>(request_.data()), request_.data() + sizeof(fuse_in_header));
      }
    }

   private:
    static constexpr std::uint32_t kMostWrite = 1 << 20;

    void answer(const fuse_in_header& in, int error, const void* body = nullptr, std::size_t length = 0) const {
      fuse_out_header out{.len = static_cast<std::uint32_t>(sizeof out + length), .error = -error, .unique = in.unique};
      const iovec parts[] = {{&out, sizeof out}, {const_cast<void*>(body), length}};
      (void)!writev(device_, parts, 2);
    }

    fuse_attr attributes(std::uint64_t node) const {
      fuse_attr attr{};
      attr.ino = node;
      attr.size = node == 2 ? bytes_ : 0;
      attr.blocks = attr.size / 512;
      attr.mode = node == 2 ? (S_IFREG | 0600) : (S_IFDIR | 0700);
      attr.nlink = 1;
      attr.blksize = 4096;
      return attr;
    }

    void serve(const fuse_in_header& in, const char* body) {
      switch (in.opcode) {
        case FUSE_INIT: {
          fuse_init_out out{};
          out.major = FUSE_KERNEL_VERSION;
          out.minor = FUSE_KERNEL_MINOR_VERSION;
          out.flags = FUSE_ASYNC_READ | FUSE_MAX_PAGES;
          out.max_background = 64;
          out.congestion_threshold = 48;
          out.max_write = kMostWrite;
          out.max_pages = kMostWrite / 4096;
          out.time_gran = 1;
          return answer(in, 0, &out, sizeof out);
        }
        case FUSE_LOOKUP: {
          if (std::strcmp(body, "disk") != 0) return answer(in, ENOENT);
          fuse_entry_out out{};
          out.nodeid = 2;
          out.entry_valid = out.attr_valid = 3600;
          out.attr = attributes(2);
          return answer(in, 0, &out, sizeof out);
        }
        case FUSE_GETATTR:
        case FUSE_SETATTR: {
          fuse_attr_out out{};
          out.attr_valid = 3600;
          out.attr = attributes(in.nodeid);
          return answer(in, 0, &out, sizeof out);
        }
        case FUSE_OPEN: {
          fuse_open_out out{};
          out.open_flags = FOPEN_DIRECT_IO;
          return answer(in, 0, &out, sizeof out);
        }
        case FUSE_READ: {
          const auto& what = *reinterpret_cast<const fuse_read_in*>(body);
          const std::uint64_t begin = std::min(what.offset, bytes_);
          return answer(in, 0, memory_ + begin, std::min<std::uint64_t>(what.size, bytes_ - begin));
        }
        case FUSE_WRITE: {
          const auto& what = *reinterpret_cast<const fuse_write_in*>(body);
          if (what.offset > bytes_ || what.size > bytes_ - what.offset) return answer(in, EFBIG);
          std::memcpy(memory_ + what.offset, body + sizeof what, what.size);
          if (record_ != nullptr) record_->add(false, what.offset, body + sizeof what, what.size);
          fuse_write_out out{.size = what.size};
          return answer(in, 0, &out, sizeof out);
        }
        case FUSE_STATFS: {
          fuse_statfs_out out{};
          out.st.bsize = out.st.frsize = 4096;
          out.st.blocks = bytes_ / 4096;
          out.st.namelen = 255;
          return answer(in, 0, &out, sizeof out);
        }
        case FUSE_FSYNC:
          if (record_ != nullptr) record_->add(true);
          return answer(in, 0);
        case FUSE_FLUSH:
        case FUSE_RELEASE:
          return answer(in, 0);
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
        case FUSE_INTERRUPT:
          return;
        default:
          return answer(in, ENOSYS);
      }
    }

    const int device_;
    const std::uint64_t bytes_;
    char* const memory_;
    DriveRecord* const record_;
    std::vector<char> request_;
  };

  static void* shared(std::uint64_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return memory;
  }

  std::filesystem::path path_;
  std::uint64_t bytes_;
  char* memory_;
  DriveRecord* record_;
  bool mounted_ = false;
  pid_t server_ = -1;
};

}  // namespace tierflow::testing
