// Instructions that start what ends later, and those that wait for it: copies, barriers, TMA.
#include <cstring>

#include "cuda/runtime/driver.h"
#include "ptx.h"
#include "tests/fake_cuda.h"

namespace emulator {
namespace {

// ---- clusters ----------------------------------------------------------------------------------

void map_to_cluster(Frame& f) {
  const uint32 cta = f.get32(2);
  if (cta >= current->block->cluster->blocks.size()) fail("%s: there is no CTA %u", f.name(), cta);
  f.set(0, current->block->own(f.get32(1), f.name()) | cta << kCtaShift);
}
Block* cta_of(uint32 address, const char* name) {
  const std::vector<Block*>& blocks = current->block->cluster->blocks;
  const uint32 cta = address >> kCtaShift;
  if (cta >= blocks.size()) fail("%s: there is no CTA %u", name, cta);
  if (blocks[cta]->running == 0) fail("%s: CTA %u of the cluster has ended", name, cta);
  return blocks[cta];
}
// [destination], values, [barrier], both of one CTA of the cluster.
void store_async(Frame& f) {
  const uint32 bytes = element_bytes(f), all = bytes * static_cast<uint32>(f.list(1).size());
  const uint32 address = f.get32(0), barrier = f.get32(2);
  if (barrier >> kCtaShift != address >> kCtaShift) {
    fail("%s: the place and the mbarrier are not in one CTA of the cluster", f.name());
  }
  Block* block = cta_of(address, f.name());
  block->shared(address, all, all, f.name());
  block->barrier(barrier, f.name());
  std::vector<unsigned char> values(all);
  store_to(f, values.data(), bytes);
  const char* name = f.name();
  const Action action = [=] {
    std::memcpy(block->overwritten(address, all, name), values.data(), all);
    block->complete_bytes(barrier, all, name);
  };
  if (may_happen_early() && happens_early()) return action();
  block->in_flight.push_back(action);
}
// _, [barrier], of any CTA of the cluster.
void arrive_elsewhere(Frame& f) { cta_of(f.get32(1), f.name())->arrive(f.get32(1), 1, f.name()); }
void arrive_in_cluster(Frame& f) {
  Cluster& cluster = *current->block->cluster;
  if (current->arrived) fail("%s: a second time without a wait", f.name());
  current->arrived = true;
  current->arrived_phase = cluster.phase;
  ++cluster.arrived;
  cluster.settle();
}
void wait_for_cluster(Frame& f) {
  Cluster& cluster = *current->block->cluster;
  if (!current->arrived) fail("%s: without an arrival", f.name());
  current->arrived = false;
  if (cluster.phase != current->arrived_phase) return;
  cluster.waiting.push_back(current);
  wait("barrier.cluster");
}

// ---- cp.async ----------------------------------------------------------------------------------

// [destination], [source], bytes (, bytes to copy or a predicate that says to copy none).
void copy_async(Frame& f) {
  const uint32 destination = f.get32(0), bytes = f.get32(2);
  const uint64 source = f.get(1);
  uint32 copied = bytes;
  if (f.arguments() > 3) {
    copied = f.argument(3).predicate ? (f.get(3) != 0 ? 0 : bytes) : f.get32(3);
  }
  if (copied > bytes) fail("%s: %u of %u bytes", f.name(), copied, bytes);
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("%s: %u bytes", f.name(), bytes);
  current->block->shared(destination, bytes, bytes, f.name());
  if (source % bytes != 0) fail("%s: the source is not a multiple of %u", f.name(), bytes);
  const char* name = f.name();
  Action action = [=] {
    unsigned char* target = current->block->written(destination, bytes, name);
    const auto* from = reinterpret_cast<const unsigned char*>(source);
    if (copied > 0) check_global(from, copied, 1, name);
    std::memset(target, 0, bytes);
    if (copied > 0) std::memcpy(target, from, copied);
  };
  if (happens_early()) return action();
  current->copies.open.push_back(std::move(action));
}

// [barrier]: an arrival when this thread's copies so far have taken place, which then do so by
// themselves; no wait_group of the thread counts them any more.
void arrive_after_copies(Frame& f) {
  Thread* thread = current;
  Groups& copies = thread->copies;
  copies.commit();
  const auto groups = std::move(copies.committed);
  copies.committed.clear();
  const uint32 barrier = f.get32(0);
  thread->block->barrier(barrier, f.name());
  const char* name = f.name();
  start_copy([=] {
    Thread* const other = current;
    current = thread;
    for (const auto& group : groups) {
      for (const Action& action : group) action();
    }
    current = other;
    thread->block->arrive(barrier, 1, name);
  });
}

// ---- mbarriers ---------------------------------------------------------------------------------

void init_barrier(Frame& f) {
  Block& block = *current->block;
  block.shared(f.get32(0), 8, 8, f.name());
  const auto count = static_cast<int>(f.get32(1));
  if (count < 1) fail("%s: %d arrivals", f.name(), count);
  const uint32 at = f.get32(0) & kOwn;
  const auto old = block.barriers.find(at);
  if (old != block.barriers.end() && !old->second.waiting.empty()) {
    fail("%s: threads wait at the mbarrier", f.name());
  }
  block.barriers[at] = {count, count, 0, 0, {}};
}
void arrive(Frame& f) {  // _, [barrier] (, count)
  current->block->arrive(f.get32(1), f.arguments() > 2 ? static_cast<int>(f.get32(2)) : 1,
                         f.name());
}
void expect(Frame& f) {  // [barrier], bytes
  current->block->barrier(f.get32(0), f.name()).bytes += f.get32(1);
}
void arrive_expect(Frame& f) {  // _, [barrier], bytes
  current->block->barrier(f.get32(1), f.name()).bytes += f.get32(2);
  current->block->arrive(f.get32(1), 1, f.name());
}
void test_barrier(Frame& f) {  // done, [barrier], parity
  const MemoryBarrier& barrier = current->block->barrier(f.get32(1), f.name());
  // Who asks again and again lets others go on.
  const bool asks_again = ++current->tests % 8 == 0;
  if (barrier.phase == (f.get32(2) & 1) && (asks_again || happens_early())) poll(f.name());
  f.set(0, barrier.phase != (f.get32(2) & 1));
}
void wait_until(Frame& f) {  // done, [barrier], parity
  current->block->barrier(f.get32(1), f.name());
  wait_barrier(f.get32(1) & kOwn, f.get32(2) & 1);
  f.set(0, 1);
}
void named_barrier(Frame& f, bool waits) {
  const auto count =
      f.arguments() > 1 ? f.get32(1) : static_cast<uint32>(current->block->threads.size());
  if (count % 32 != 0 || count == 0) fail("%s: %u threads", f.name(), count);
  current->block->named_barrier(static_cast<int>(f.get32(0)), static_cast<int>(count), waits,
                                false);
}

// ---- TMA ---------------------------------------------------------------------------------------

const FakeMap& tensor_map(const Frame& f, uint64 address) {
  if (address % 64 != 0) fail("%s: the tensor map is not a multiple of 64", f.name());
  const auto& map = *reinterpret_cast<const FakeMap*>(address);
  if (map.address == nullptr) fail("%s: an empty tensor map", f.name());
  return map;
}

// Visits the pieces of a box that lie side by side in both memories: their place in the box in
// bytes, the element of the array or null, elements.
struct Box {
  const FakeMap* map;
  int start[4];
  uint32 element() const {  // bytes
    return map->type == jax_flash::kTensorFloat32 ? 4
           : map->type == jax_flash::kTensorUint8 ? 1
                                                  : 2;
  }
  uint32 bytes() const { return element() * map->box[0] * map->box[1] * map->box[2] * map->box[3]; }
};
Box box_of(const Frame& f, const Argument& memory) {
  if (memory.parts.size() != 2 || memory.parts[1].parts.size() != 4) {
    fail("%s: a map and four coordinates are needed", f.name());
  }
  Box box{&tensor_map(f, f.get(memory.parts[0])), {}};
  bool inside = true;
  for (int i = 0; i < 4; ++i) {
    box.start[i] = static_cast<int>(f.get(memory.parts[1].parts[i]));
    inside = inside && box.start[i] > -static_cast<std::int64_t>(box.map->box[i]) &&
             (i == 0 || i == 2 || box.start[i] < static_cast<std::int64_t>(box.map->dims[i]));
  }
  if (!inside) {
    fail(
        "%s: the box at column %d, head %d, row %d, batch %d lies outside of [%llu, %llu, %llu, "
        "%llu]",
        f.name(), box.start[0], box.start[1], box.start[2], box.start[3],
        static_cast<unsigned long long>(box.map->dims[3]),
        static_cast<unsigned long long>(box.map->dims[2]),
        static_cast<unsigned long long>(box.map->dims[1]),
        static_cast<unsigned long long>(box.map->dims[0]));
  }
  return box;
}
template <class Visit>
void visit_chunks(const Box& box, uint32 shared, const Visit& visit) {
  const FakeMap& map = *box.map;
  const uint32 size = box.element(), each = kChunk / size, chunks = map.box[0] / each;
  const uint32 runs = map.box[1] * map.box[2] * map.box[3];  // each of the first dim
  for (uint32 i = 0; i < runs * chunks; ++i) {
    const uint32 run = i / chunks, head = run % map.box[1], rest = run / map.box[1];
    uint32 at = shared + i * kChunk;
    if (map.swizzle == 3) at ^= (at >> 7 & 7) << 4;
    const std::int64_t c[4] = {box.start[0] + i % chunks * each, box.start[1] + head,
                               box.start[2] + rest % map.box[2], box.start[3] + rest / map.box[2]};
    const auto dims = [&](int i) { return static_cast<std::int64_t>(map.dims[i]); };
    bool inside = true;
    for (int i = 0; i < 4; ++i) inside = inside && c[i] >= 0 && c[i] < dims(i);
    const std::int64_t elements = inside ? std::min<std::int64_t>(dims(0) - c[0], each) : 0;
    auto* data = static_cast<unsigned char*>(map.address) + size * c[0] + c[1] * map.strides[0] +
                 c[2] * map.strides[1] + c[3] * map.strides[2];
    visit(at, data, static_cast<uint32>(size * elements));
  }
}
uint32 box_alignment(const Box& box) { return box.map->swizzle == 0 ? 16 : 128; }

// [destination], [map, {coordinates}], [barrier] (, policy)
void load_box(Frame& f) {
  const Box box = box_of(f, f.argument(1));
  const uint32 destination = f.get32(0), barrier = f.get32(2);
  Block* block = current->block;
  block->shared(destination, box.bytes(), box_alignment(box), f.name());
  block->barrier(barrier, f.name());
  const char* name = f.name();
  start_copy([=] {
    visit_chunks(box, destination, [&](uint32 at, const unsigned char* data, uint32 bytes) {
      unsigned char* target = block->overwritten(at, kChunk, name);
      std::memset(target, 0, kChunk);
      std::memcpy(target, data, bytes);
    });
    block->complete_bytes(barrier, box.bytes(), name);
  });
}
// [destination], [source], bytes, [barrier]
void load_bulk(Frame& f) {
  const uint32 destination = f.get32(0), bytes = f.get32(2), barrier = f.get32(3);
  Block* block = current->block;
  if (bytes % 16 != 0 || bytes == 0) fail("%s: %u bytes", f.name(), bytes);
  block->shared(destination, bytes, 16, f.name());
  block->barrier(barrier, f.name());
  const unsigned char* source = global(f, 1, bytes, 16);
  const char* name = f.name();
  start_copy([=] {
    std::memcpy(block->overwritten(destination, bytes, name), source, bytes);
    block->complete_bytes(barrier, bytes, name);
  });
}
// [destination], [source], bytes, [barrier], from this CTA to another one of the cluster
void send_bulk(Frame& f) {
  const uint32 destination = f.get32(0), source = f.get32(1), bytes = f.get32(2);
  const uint32 barrier = f.get32(3);
  if (barrier >> kCtaShift != destination >> kCtaShift) {
    fail("%s: the place and the mbarrier are not in one CTA of the cluster", f.name());
  }
  if (bytes % 16 != 0 || bytes == 0) fail("%s: %u bytes", f.name(), bytes);
  Block *block = current->block, *other = cta_of(destination, f.name());
  block->shared(source, bytes, 16, f.name());
  other->shared(destination, bytes, 16, f.name());
  other->barrier(barrier, f.name());
  const char* name = f.name();
  start_copy([=] {
    const unsigned char* from = block->read_async(source, bytes, name);
    std::memcpy(other->overwritten(destination, bytes, name), from, bytes);
    other->complete_bytes(barrier, bytes, name);
  });
}
// [destination], [source], bytes
void store_bulk(Frame& f) {
  const uint32 source = f.get32(1), bytes = f.get32(2);
  Block* block = current->block;
  if (bytes % 16 != 0 || bytes == 0) fail("%s: %u bytes", f.name(), bytes);
  block->shared(source, bytes, 16, f.name());
  unsigned char* to = global(f, 0, bytes, 16);
  const char* name = f.name();
  Action action = [=] { std::memcpy(to, block->read_async(source, bytes, name), bytes); };
  if (happens_early()) {
    action();
    action = [] {};
  }
  current->bulk.open.push_back(std::move(action));
}
// [map, {coordinates}], [source]
void store_box(Frame& f) {
  const Box box = box_of(f, f.argument(0));
  const uint32 source = f.get32(1);
  Block* block = current->block;
  block->shared(source, box.bytes(), box_alignment(box), f.name());
  const char* name = f.name();
  Action action = [=] {
    visit_chunks(box, source, [&](uint32 at, unsigned char* data, uint32 bytes) {
      if (bytes > 0) std::memcpy(data, block->read_async(at, kChunk, name), bytes);
    });
  };
  if (happens_early()) {
    action();
    action = [] {};
  }
  current->bulk.open.push_back(std::move(action));
}

}  // namespace

const Table kAsynchronous = {
    // Clusters.
    {"mapa.shared::cluster.u32", map_to_cluster},
    {"st.async.shared::cluster.mbarrier::complete_tx::bytes.*", store_async},
    // Kernels run one after the other.
    {"griddepcontrol.launch_dependents", nothing},
    {"griddepcontrol.wait", nothing},
    {"prefetch.global.L2", nothing},
    {"cp.async.bulk.prefetch.tensor.4d.L2.global.tile", nothing},
    {"prefetch.tensormap", nothing},
    // cp.async.
    {"cp.async.ca.shared.global", copy_async},
    {"cp.async.cg.shared.global", copy_async},
    {"cp.async.commit_group", [](Frame&) { current->copies.commit(); }},
    {"cp.async.wait_group", [](Frame& f) { current->copies.wait(f.get32(0)); }},
    {"cp.async.wait_all",
     [](Frame&) {
       current->copies.commit();
       current->copies.wait(0);
     }},
    // Barriers.
    {"bar.sync", [](Frame& f) { named_barrier(f, true); }},
    {"bar.arrive", [](Frame& f) { named_barrier(f, false); }},
    {"cp.async.mbarrier.arrive.noinc.shared::cta.b64", arrive_after_copies},
    {"mbarrier.init.shared::cta.b64", init_barrier},
    {"mbarrier.arrive.shared::cta.b64", arrive},
    {"mbarrier.expect_tx.relaxed.cta.shared::cta.b64", expect},
    {"mbarrier.arrive.expect_tx.shared::cta.b64", arrive_expect},
    {"mbarrier.test_wait.parity.shared::cta.b64", test_barrier},
    {"mbarrier.try_wait.parity.shared::cta.b64", wait_until},
    {"fence.mbarrier_init.release.cluster", nothing},
    {"mbarrier.arrive.release.cluster.shared::cluster.b64", arrive_elsewhere},
    {"barrier.cluster.arrive.relaxed", arrive_in_cluster},
    {"barrier.cluster.arrive.release", arrive_in_cluster},
    {"barrier.cluster.wait.acquire", wait_for_cluster},
    {"fence.proxy.async.shared::cta", [](Frame&) { current->fence(); }},
    {"fence.proxy.async.global", nothing},
    // TMA and bulk copies.
    {"cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
     ".L2::cache_hint",
     load_box},
    {"cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group", store_box},
    {"cp.async.bulk.global.shared::cta.bulk_group", store_bulk},
    {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", load_bulk},
    {"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", send_bulk},
    {"cp.async.bulk.commit_group", [](Frame&) { current->bulk.commit(); }},
    {"cp.async.bulk.wait_group.read", [](Frame& f) { current->bulk.wait(f.get32(0)); }},
    {"cp.async.bulk.wait_group", [](Frame& f) { current->bulk.wait(f.get32(0)); }},
};

}  // namespace emulator
