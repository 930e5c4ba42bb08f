// The machine as fake_cuda.cc knows it: compiles a kernel's text, loads it and launches it.
#include "machine.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cfenv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <system_error>

#include "scheduler.h"
#include "tests/fake_cuda.h"

namespace emulator {
namespace {

constexpr int kResident = 3;             // CTAs at a time
constexpr std::int64_t kPolls = 30'000;  // without any progress: a deadlock

struct Program {
  std::vector<Library> libraries;  // one for each CTA that runs at a time
};

// Makes program.so of program.cu in a folder, or says in its file "log" why not: translate.py.
bool (*compiler)(const char* folder) = nullptr;

namespace fs = std::filesystem;

std::string MakeFolder() {
  std::string folder = (fs::temp_directory_path() / "emulatorXXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) {
    throw fs::filesystem_error("mkdtemp", folder, std::error_code(errno, std::generic_category()));
  }
  return folder;
}

// A folder of files that programs include.
struct Headers {
  std::map<std::string, std::string> files;
  std::string folder = MakeFolder();

  explicit Headers(const std::map<std::string, std::string>& given) : files(given) {
    for (const auto& [name, text] : files) {
      const fs::path path = fs::path(folder) / name;
      fs::create_directories(path.parent_path());
      std::ofstream(path) << text;
    }
  }
  ~Headers() { fs::remove_all(folder); }
};

// Written once for the programs that follow each other: most have the same files.
std::shared_ptr<const Headers> WriteHeaders(const std::map<std::string, std::string>& files) {
  static std::mutex mutex;
  static std::shared_ptr<const Headers> last;
  const std::lock_guard<std::mutex> lock(mutex);
  if (last == nullptr || last->files != files) last = std::make_shared<Headers>(files);
  return last;
}

class Machine : public FakeMachine {
 public:
  std::string Compile(const std::string& source, const std::map<std::string, std::string>& files,
                      std::string* image) override {
    if (compiler == nullptr) return "the emulator has no compiler";
    try {
      return CompileIn(MakeFolder(), source, files, image);
    } catch (const fs::filesystem_error& error) {
      return error.what();
    }
  }

  static std::string CompileIn(const std::string& folder, const std::string& source,
                               const std::map<std::string, std::string>& files,
                               std::string* image) {
    const std::shared_ptr<const Headers> headers = WriteHeaders(files);
    std::ofstream(folder + "/program.cu") << source;
    fs::create_directory_symlink(headers->folder, folder + "/headers");
    const auto read = [](const std::string& path) {
      std::ifstream file(path, std::ios::binary);
      return std::string(std::istreambuf_iterator<char>(file), {});
    };
    std::string trouble;
    if (!compiler(folder.c_str())) trouble = "translate.py failed:\n" + read(folder + "/log");
    *image = read(folder + "/program.so");
    fs::remove_all(folder);
    return trouble;
  }

  std::string Load(const std::string& image, void** program) override {
    auto* made = new Program;
    for (int i = 0; i < kResident; ++i) {
      const int file = memfd_create("kernel", 0);  // stays open: its number is part of a path
      if (file < 0 || write(file, image.data(), image.size()) < 0) return "no memory for a library";
      const std::string path = "/proc/self/fd/" + std::to_string(file);
      void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) return dlerror();
      const auto pointer = [&](const char* name) {
        return *static_cast<unsigned char**>(dlsym(library, name));
      };
      made->libraries.push_back({static_cast<unsigned char*>(dlsym(library, "emulator_shared")),
                                 pointer("emulator_statics_begin"), pointer("emulator_statics_end"),
                                 static_cast<const Kernel*>(dlsym(library, "emulator_kernels")),
                                 nullptr, 0});
      struct Search {
        const void* base;
        Library* found;
      } search{nullptr, &made->libraries.back()};
      Dl_info info;
      dladdr(search.found->kernels, &info);
      search.base = info.dli_fbase;
      dl_iterate_phdr(
          [](dl_phdr_info* object, std::size_t, void* data) {
            auto& search = *static_cast<Search*>(data);
            if (reinterpret_cast<const void*>(object->dlpi_addr) != search.base) return 0;
            search.found->image = static_cast<const unsigned char*>(search.base);
            for (int i = 0; i < object->dlpi_phnum; ++i) {
              const auto& part = object->dlpi_phdr[i];
              if (part.p_type != PT_LOAD) continue;
              search.found->image_bytes =
                  std::max<std::size_t>(search.found->image_bytes, part.p_vaddr + part.p_memsz);
            }
            return 1;
          },
          &search);
    }
    *program = made;
    return "";
  }

  bool Has(void* program, const std::string& kernel) override {
    return Find(*static_cast<Program*>(program), kernel) >= 0;
  }

  void SetBuffers(std::vector<FakeBuffer> given) override { buffers = std::move(given); }

  // XLA's threads make denormal numbers zero; a GPU's instructions without .ftz do not, and its
  // products keep what a weight of 2^-80 and a value of 1e-14 leave.
  class GpuArithmetic {
   public:
    GpuArithmetic() {
      std::fegetenv(&callers_);
      std::fesetenv(FE_DFL_ENV);
    }
    ~GpuArithmetic() { std::fesetenv(&callers_); }
    GpuArithmetic(const GpuArithmetic&) = delete;
    GpuArithmetic& operator=(const GpuArithmetic&) = delete;

   private:
    std::fenv_t callers_;
  };

  std::string Launch(void* program, const std::string& kernel, unsigned grid, unsigned cluster,
                     unsigned threads, unsigned shared_bytes, const void* params) override {
    const std::lock_guard<std::mutex> lock(one_at_a_time_);
    std::vector<Library>& libraries = static_cast<Program*>(program)->libraries;
    const int which = Find(*static_cast<Program*>(program), kernel);
    const Kernel& first = libraries[0].kernels[which];
    if (threads > first.max_threads) {
      return kernel + ": " + std::to_string(threads) + " threads are more than its " +
             "__launch_bounds__ of " + std::to_string(first.max_threads);
    }
    if (cluster > kResident) {
      return kernel + ": clusters of " + std::to_string(cluster) + ", of which the emulator runs " +
             std::to_string(kResident) + " CTAs at a time";
    }
    const GpuArithmetic arithmetic;
    failure.clear();
    polls = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    unsigned next = 0;
    const auto start_cluster = [&](const std::vector<Block*>& members) {
      auto made = std::make_shared<Cluster>();
      made->blocks = members;
      for (uint32 rank = 0; rank < members.size(); ++rank) {
        Block* block = members[rank];
        block->cluster = made;
        block->rank = rank;
        start_block(*block, next++, grid, threads);
        made->running += block->running;
      }
    };
    for (std::size_t i = 0; i + cluster <= libraries.size() && next < grid; i += cluster) {
      std::vector<Block*> members;
      for (std::size_t j = i; j < i + cluster; ++j) {
        blocks.push_back(std::make_unique<Block>());
        Block& block = *blocks.back();
        block.library = &libraries[j];
        block.shared_bytes = shared_bytes;
        block.kernel = &libraries[j].kernels[which];
        block.params = params;
        members.push_back(&block);
      }
      start_cluster(members);
    }
    std::size_t at = 0, stuck = 0;
    while (!blocks.empty() && failure.empty()) {
      at = policy.order == Order::kRandom ? draw(blocks.size()) : (at + 1) % blocks.size();
      Block& block = *blocks[at];
      if (block.running > 0 && run_block(block)) {
        stuck = 0;
      } else if (++stuck > 64 * blocks.size()) {
        report_deadlock(blocks);
      }
      if (polls > kPolls) report_deadlock(blocks);
      if (block.running > 0 || !failure.empty()) continue;
      if (!block.in_flight.empty()) {
        failure = "a CTA ends with copies in flight";
        continue;
      }
      if (block.cluster->running > 0) continue;
      const std::vector<Block*> members = block.cluster->blocks;
      if (next < grid) {
        start_cluster(members);
        continue;
      }
      for (Block* member : members) {
        end_block(*member);
        blocks.erase(std::find_if(blocks.begin(), blocks.end(),
                                  [&](const auto& one) { return one.get() == member; }));
      }
      at = 0;
    }
    for (auto& block : blocks) end_block(*block);
    current = nullptr;
    return failure.empty() ? "" : kernel + ": " + failure;
  }

 private:
  static int Find(const Program& program, const std::string& name) {
    const Kernel* kernels = program.libraries[0].kernels;
    for (int i = 0; kernels[i].name != nullptr; ++i) {
      if (kernels[i].name == name) return i;
    }
    return -1;
  }

  std::mutex one_at_a_time_;
};

const bool registered = [] {
  fake_machine = new Machine;
  return true;
}();

}  // namespace
}  // namespace emulator

extern "C" void EmulatorSetGarbage(std::uint32_t word) { emulator::policy.garbage = word; }

// Threads in order and asynchronous work as late as possible (0); backwards and as early as
// possible (1); as drawn from the seed, of which 5, 9, ... have that work late: what comes first is
// used before the rest comes.
extern "C" void EmulatorSetSeed(std::uint64_t seed) {
  using namespace emulator;
  policy.order = seed == 0 ? Order::kForward : seed == 1 ? Order::kBackward : Order::kRandom;
  policy.copies = seed == 0 ? Policy::kLate : seed == 1 ? Policy::kEarly : Policy::kAnyTime;
  if (seed > 1 && seed % 4 == 1) policy.copies = Policy::kLate;
  policy.random.seed(seed);
}

extern "C" void EmulatorSetCompiler(bool (*compile)(const char* folder)) {
  emulator::compiler = compile;
}

// Runs one CTA of a program's only kernel, which takes a pointer to `memory`. Returns what went
// wrong.
extern "C" const char* EmulatorRunKernel(const char* text, unsigned threads, unsigned shared_bytes,
                                         void* memory, std::uint64_t bytes) {
  static std::string trouble;
  std::string image;
  void* program = nullptr;
  trouble = fake_machine->Compile(text, {}, &image);
  if (trouble.empty()) trouble = fake_machine->Load(image, &program);
  if (!trouble.empty()) return trouble.c_str();
  fake_machine->SetBuffers({{memory, bytes, "memory"}});
  const char* name = static_cast<emulator::Program*>(program)->libraries[0].kernels[0].name;
  trouble = fake_machine->Launch(program, name, 1, 1, threads, shared_bytes, &memory);
  return trouble.c_str();
}
