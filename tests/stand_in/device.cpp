// A stand-in for a GPU: device memory is host memory, kernels run at once on the CPU, and copies to and from pinned
// memory that do not block happen late, in the order of their stream.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kStandIn = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 4;
using Key = std::pair<DeviceIndex, c10::StreamId>;

Key key(const Stream& stream) { return {stream.device_index(), stream.id()}; }

// ---- streams: what was asked of them and has not happened ----

struct Task {
  std::function<void()> run;                // on the device, in the stream's order
  std::function<void()> publish;            // what the host sees only once it has waited
  std::function<void(bool)> wait;           // another stream's tasks come first
  const char* begin = nullptr;              // device memory that the task touches
  const char* end = nullptr;
  at::Tensor into;                          // pinned memory that the host sees `staged` in once it has waited
  std::shared_ptr<at::Tensor> staged;
  bool ran = false;
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t first = 0;                       // the number of tasks.front()
};

std::recursive_mutex mutex;
std::map<Key, Queue>& queues() { static auto* all = new std::map<Key, Queue>; return *all; }
thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};
std::atomic<c10::StreamId> last_stream{0};
std::atomic<int64_t> host_waits{0}, late_copies{0}, hazards{0};

// Runs the tasks of a stream numbered below `upto`; with `host`, the host has waited for them.
void flush(Key which, uint64_t upto, bool host) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& queue = queues()[which];
  for (size_t i = 0; i < queue.tasks.size() && queue.first + i < upto; i++) {
    auto& task = queue.tasks[i];
    if (task.wait) task.wait(host);
    if (task.run && !task.ran) task.run();
    task.ran = true;
    if (host && task.publish) { task.publish(); task.publish = nullptr; }
  }
  while (!queue.tasks.empty() && queue.tasks.front().ran && !queue.tasks.front().publish
         && (host || !queue.tasks.front().wait)) {
    auto done = std::move(queue.tasks.front());  // its end may free memory, which comes here again
    queue.tasks.pop_front();
    queue.first++;
  }
}

uint64_t end_of(Key which) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& queue = queues()[which];
  return queue.first + queue.tasks.size();
}

void flush_all(DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  std::vector<Key> keys;
  for (auto& [which, queue] : queues()) if (which.first == device) keys.push_back(which);
  for (auto& which : keys) flush(which, UINT64_MAX, true);
}

Stream current_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(kStandIn, device), current_streams[device]);
}

void launch() {  // a kernel on the current stream: what was asked before has run
  flush(key(current_stream(current_device)), UINT64_MAX, false);
}

struct Event { Key stream; uint64_t upto; };

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStandIn; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  Device getDevice() const override { return Device(kStandIn, current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "invalid device ordinal ", d.index());
    if (d.index() >= 0) current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  Stream getStream(Device d) const override { return current_stream(d.index() < 0 ? current_device : d.index()); }
  Stream getDefaultStream(Device d) const override {
    return Stream(Stream::DEFAULT, Device(kStandIn, d.index() < 0 ? current_device : d.index()));
  }
  Stream getNewStream(Device d, int = 0) const override {
    return Stream(Stream::UNSAFE, Device(kStandIn, d.index() < 0 ? current_device : d.index()), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    auto old = current_stream(s.device_index());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = new Event{key(s), end_of(key(s))};
  }
  void block(void* event, const Stream& s) const override {
    if (event == nullptr) return;
    auto e = *static_cast<Event*>(event);
    if (e.stream == key(s)) return;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    Task task;
    task.wait = [e](bool host) { flush(e.stream, e.upto, host); };
    queues()[key(s)].tasks.push_back(task);
  }
  bool queryEvent(void* event) const override {
    if (event) { auto e = *static_cast<Event*>(event); flush(e.stream, e.upto, true); }
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const Stream& s) const override { flush(key(s), UINT64_MAX, true); return true; }
  void synchronizeStream(const Stream& s) const override { host_waits++; flush(key(s), UINT64_MAX, true); }
  void synchronizeEvent(void* event) const override {
    host_waits++;
    if (event) { auto e = *static_cast<Event*>(event); flush(e.stream, e.upto, true); }
  }
  void synchronizeDevice(DeviceIndex d) const override { host_waits++; flush_all(d < 0 ? current_device : d); }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const Stream& s) const override;
  double elapsedTime(void*, void*, DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory ----

struct Block { size_t size = 0; Device device = c10::kCPU; std::set<Key> streams; };
std::map<char*, Block>& blocks() { static auto* all = new std::map<char*, Block>; return *all; }
std::map<char*, size_t>& pinned() { static auto* all = new std::map<char*, size_t>; return *all; }
int64_t allocated[kDevices] = {}, peak[kDevices] = {};
constexpr int64_t kTotal = int64_t(8) << 30;  // bytes of a device

void Guard::recordDataPtrOnStream(const c10::DataPtr& ptr, const Stream& s) const {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto found = blocks().find(static_cast<char*>(ptr.get_context()));
  if (found != blocks().end()) found->second.streams.insert(key(s));
}

void release(void* context) {
  if (context == nullptr) return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto* begin = static_cast<char*>(context);
  auto found = blocks().find(begin);
  auto block = found->second;
  blocks().erase(found);
  allocated[block.device.index()] -= block.size;
  for (auto& which : block.streams) flush(which, UINT64_MAX, false);
  bool used = false;
  for (auto& [which, queue] : queues())
    for (auto& task : queue.tasks)
      used |= !task.ran && task.begin && task.begin < begin + block.size && begin < task.end;
  memset(begin, 0xFF, block.size);
  if (used) hazards++;  // memory that another stream has yet to read, without record_stream: it reads poison
  else free(begin);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    Device device(kStandIn, current_device);
    if (size == 0) return {nullptr, nullptr, &release, device};
    TORCH_CHECK_WITH(OutOfMemoryError, allocated[current_device] + int64_t(size) <= kTotal, "standin out of memory. "
                     "Tried to allocate ", size, " bytes");
    auto* begin = static_cast<char*>(aligned_alloc(64, (size + 63) / 64 * 64));
    memset(begin, 0xFF, size);
    blocks()[begin] = {size, device, {key(current_stream(current_device))}};
    allocated[current_device] += size;
    peak[current_device] = std::max(peak[current_device], allocated[current_device]);
    return {begin, begin, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { launch(); memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& ptr, Stream stream) override { Guard().recordDataPtrOnStream(ptr, stream); }
  // Nothing is cached: what is reserved is what is allocated.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = allocated[device];
      (*bytes)[0].peak = peak[device];
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak[device] = allocated[device]; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override { return {kTotal - allocated[device], kTotal}; }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kStandIn, &device_allocator);

void release_pinned(void* context) {
  if (context == nullptr) return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  for (DeviceIndex d = 0; d < kDevices; d++) flush_all(d);  // the real one records an event on each stream
  pinned().erase(static_cast<char*>(context));
  free(context);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (size == 0) return {nullptr, nullptr, &release_pinned, c10::kCPU};
    auto* begin = static_cast<char*>(aligned_alloc(64, (size + 63) / 64 * 64));
    memset(begin, 0xFF, size);
    pinned()[begin] = size;
    return {begin, begin, &release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto* at = static_cast<char*>(const_cast<void*>(data));
  auto found = pinned().upper_bound(at);
  if (found == pinned().begin()) return false;
  --found;
  return at < found->first + found->second;
}

// Its numbers are those of a CPU's generator, with a state of its own.
struct Generator final : c10::GeneratorImpl {
  at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(kStandIn, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { numbers.set_offset(offset); }
  uint64_t get_offset() const override { return numbers.get_offset(); }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_state(const c10::TensorImpl& state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->numbers = numbers.clone();
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? current_device : exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Device getDeviceFromPtr(void* data) const override { return Device(kStandIn, current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    static auto* all = new std::vector<at::Generator>{
        at::make_generator<Generator>(0), at::make_generator<Generator>(1),
        at::make_generator<Generator>(2), at::make_generator<Generator>(3)};
    return (*all)[d < 0 ? current_device : d];
  }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? current_device : d); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* old = storage.unsafeGetStorageImpl();
    c10::impl::VirtualGuardImpl guard(kStandIn);
    auto before = guard.exchangeDevice(old->device());
    auto data = device_allocator.allocate(size);
    guard.setDevice(before);
    if (size && old->nbytes()) { launch(); memcpy(data.get(), old->data(), std::min(size, old->nbytes())); }
    old->set_data_ptr_noswap(std::move(data));
    old->set_nbytes(size);
  }
};

// ---- operators ----

at::Tensor host(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

c10::Device placed(std::optional<Device> device) {
  auto d = c10::device_or_default(device);
  return d.has_index() ? d : Device(kStandIn, current_device);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

std::pair<const char*, const char*> range(const at::Tensor& t) {
  auto* begin = static_cast<const char*>(t.data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  return {begin, begin + (last + 1) * t.element_size()};
}

void poison(at::Tensor target) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (c10::isFloatingType(target.scalar_type())) target.fill_(NAN);
}

// What the device reads from pinned memory: with what it has written there, of which the host knows nothing yet.
void read_pinned(const at::Tensor& source, at::Tensor target) {
  std::vector<std::pair<at::Tensor, at::Tensor>> hidden;
  auto [begin, end] = range(source);
  for (auto& [which, queue] : queues()) {
    for (auto& task : queue.tasks) {
      if (!task.ran || !task.publish || !task.into.defined()) continue;
      auto [first, last] = range(task.into);
      if (first >= end || begin >= last) continue;
      hidden.emplace_back(task.into, task.into.clone());
      task.into.copy_(*task.staged);
    }
  }
  target.copy_(source);
  for (auto it = hidden.rbegin(); it != hidden.rend(); ++it) it->first.copy_(it->second);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  bool up = from.is_cpu(), down = to.is_cpu();
  const auto& there = up ? to : from;
  auto stream = key(current_stream(there.device().index()));
  if (!up && !down) {  // on the device
    launch();
    flush(stream, UINT64_MAX, false);
    host(to).copy_(host(from));
    return to;
  }
  if (!non_blocking || !is_pinned((up ? from : to).data_ptr()) || from.is_conj() || from.is_neg()) {
    flush(stream, UINT64_MAX, true);
    if (!up || !non_blocking) host_waits++;  // as `memcpy_and_sync` of ATen/native/cuda/Copy.cu, from any host memory
    up ? host(to).copy_(from) : const_cast<at::Tensor&>(to).copy_(host(from));
    return to;
  }
  late_copies++;
  Task task;
  std::tie(task.begin, task.end) = range(there);
  if (up) {
    auto source = from;
    auto target = host(to);
    poison(target);
    task.run = [source, target] { at::AutoDispatchBelowADInplaceOrView below; read_pinned(source, target); };
  } else {
    auto source = host(from);
    auto target = to;
    auto staged = std::make_shared<at::Tensor>();
    poison(target);
    task.into = target.detach();
    task.staged = staged;
    task.run = [source, staged] { *staged = source.clone(); };
    task.publish = [target, staged]() mutable { at::AutoDispatchBelowADInplaceOrView below; target.copy_(*staged); };
  }
  std::lock_guard<std::recursive_mutex> lock(mutex);
  queues()[stream].tasks.push_back(std::move(task));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& t) {
  host_waits++;
  flush(key(current_stream(t.device().index())), UINT64_MAX, true);
  return at::native::_local_scalar_dense_cpu(host(t));
}

at::Tensor as_strided(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, c10::IntArrayRef size) { return at::native::view(t, size); }
at::Tensor reshape_alias(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}
const at::Tensor& resize_(const at::Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto needed = at::detail::computeStorageNbytesContiguous(size, t.element_size(), t.storage_offset());
  if (needed > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), needed);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return t;
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return t;
}
at::Tensor& set_whole_storage(at::Tensor& t, at::Storage storage) {
  int64_t n = storage.nbytes() / t.element_size();
  return set_storage(t, std::move(storage), 0, {n}, {});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& from) {
  return set_storage(t, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

const std::set<std::string> host_arguments = {
    "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_pack_padded_sequence",
    "aten::_pack_padded_sequence_backward", "aten::set_", "aten::equal", "aten::_index_put_impl"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launch();
  // What a kernel of a real device refuses: its arguments on two devices.
  bool device = false, list_host = false, wide_host = false, list_device = false;
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  for (auto& value : arguments) {
    if (value.isTensor()) {
      const auto& t = value.toTensor();
      if (!t.defined()) continue;
      if (t.device().type() == kStandIn) device = true;
      else if (t.is_cpu() && t.dim() > 0) wide_host = true;
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) {
        if (t.device().type() == kStandIn) list_device = device = true;
        else if (t.is_cpu()) list_host = true;
      }
    }
  }
  const auto& name = op.operator_name();
  auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  if (device && (wide_host || (list_host && list_device)) && !host_arguments.count(full))
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found standin and cpu in ", full);
  for (size_t i = 0; i < arguments.size(); i++) {
    auto type = op.schema().arguments()[i].type();
    if (type->kind() == c10::TypeKind::OptionalType) type = type->expectRef<c10::OptionalType>().getElementType();
    if (device && type->kind() == c10::TypeKind::GeneratorType) {
      const auto& given = arguments[i].isNone() ? at::detail::getPrivateUse1Hooks().getDefaultGenerator(-1) : arguments[i].toGenerator();
      TORCH_CHECK(given.device().type() == kStandIn, "Expected a 'standin' device type for generator but found 'cpu' in ", full);
      (*stack)[stack->size() - arguments.size() + i] = given.get<Generator>()->numbers;
    }
  }
  for (auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kStandIn) {
      auto d = value.toTensor().device().index();
      if (d != current_device) flush(key(current_stream(d)), UINT64_MAX, false);
    }
  }
  auto before = host_waits.load();
  at::native::cpu_fallback(op, stack);
  // Its own copies are no copies of a device, which waits to know a value or a shape.
  bool asked = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  host_waits = before + (device && asked);
}

at::Tensor to_device(const at::Tensor& t, Device d) { return t.defined() ? t.to(d, /*non_blocking=*/true) : t; }
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  launch();
  std::optional<at::Tensor> b;
  if (bias && bias->defined()) b = host(*bias);
  return to_device(at::convolution(host(input), host(weight), b, stride, padding, dilation, transposed, output_padding, groups),
                   input.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  launch();
  auto [i, w, b] = at::convolution_backward(host(grad), host(input), host(weight), c10::IntArrayRef{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)},
                                            stride, padding, dilation, transposed, output_padding, groups, mask);
  auto d = input.device();
  return {to_device(i, d), to_device(w, d), to_device(b, d)};
}
// Its running statistics are written, which its schema does not say.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  launch();
  auto on_host = [](const std::optional<at::Tensor>& t) {
    return t && t->defined() ? std::optional<at::Tensor>(host(*t)) : std::nullopt;
  };
  auto [output, saved_mean, saved_variance] = at::native_batch_norm(
      host(input), on_host(weight), on_host(bias), on_host(mean), on_host(variance), training, momentum, eps);
  auto d = input.device();
  return {to_device(output, d), to_device(saved_mean, d), to_device(saved_variance, d)};
}
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                   std::optional<double>, bool) { return 0; }  // math

bool compatible(const at::Tensor&, const at::Tensor&) { return true; }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", compatible); }
bool is_set_to(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() && a.storage_offset() == b.storage_offset()
      && a.sizes() == b.sizes() && a.strides() == b.strides();
}
void record_stream(at::Tensor& t, Stream stream) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// ---- collectives: gloo over the same memory ----

struct Done final : c10d::Work {
  Done(int rank, c10d::OpType type, std::vector<at::Tensor> outputs) : Work(rank, type), outputs_(std::move(outputs)) {
    std::vector<Device> devices;
    if (!outputs_.empty() && outputs_[0].device().type() == kStandIn) devices.push_back(outputs_[0].device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    future_->markCompleted(c10::IValue(outputs_));
    finish();
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::vector<at::Tensor> hosts(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (auto& t : tensors) result.push_back(t.device().type() == kStandIn ? host(t) : t);
  return result;
}

struct GroupOptions final : c10d::Backend::Options {
  GroupOptions() : Options("standin") {}
};

struct Group final : c10d::Backend {
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<GroupOptions>(); }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    auto inner = gloo_->getBackendOptions();
    inner->group_name = options->group_name;
    auto gloo = gloo_->split(store, ranks, inner);
    auto mine = std::find(ranks.begin(), ranks.end(), getRank());
    if (mine == ranks.end()) return nullptr;
    return c10::make_intrusive<Group>(int(mine - ranks.begin()), int(ranks.size()), gloo);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  Group(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : Backend(rank, size), gloo_(std::move(gloo)) {}
  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::string getBackendName() const override { return "standin"; }

  c10::intrusive_ptr<c10d::Work> done(c10d::OpType type, std::vector<at::Tensor> outputs) {
    return c10::make_intrusive<Done>(getRank(), type, std::move(outputs));
  }
  template <class Options>
  void reduced(const std::vector<at::Tensor>& on_host, Options& options, const std::function<void(Options&)>& run) {
    launch();
    bool average = options.reduceOp == c10d::ReduceOp::AVG;
    if (average) options.reduceOp = c10d::ReduceOp::SUM;
    run(options);
    if (average) for (auto& t : on_host) c10::isIntegralType(t.scalar_type(), true) ? const_cast<at::Tensor&>(t).div_(getSize(), "trunc") : const_cast<at::Tensor&>(t).div_(getSize());
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& t, const c10d::AllreduceOptions& given) override {
    auto h = hosts(t); auto options = given;
    reduced<c10d::AllreduceOptions>(h, options, [&](auto& o) { gloo_->allreduce(h, o)->wait(); });
    return done(c10d::OpType::ALLREDUCE, t);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& t, const c10d::BroadcastOptions& o) override {
    launch(); auto h = hosts(t); gloo_->broadcast(h, o)->wait();
    return done(c10d::OpType::BROADCAST, t);
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& t, const c10d::ReduceOptions& given) override {
    auto h = hosts(t); auto options = given;
    reduced<c10d::ReduceOptions>(h, options, [&](auto& o) { gloo_->reduce(h, o)->wait(); });
    return done(c10d::OpType::REDUCE, t);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                                           const c10d::AllgatherOptions& o) override {
    launch(); std::vector<std::vector<at::Tensor>> h; for (auto& list : out) h.push_back(hosts(list));
    auto i = hosts(in); gloo_->allgather(h, i, o)->wait();
    return done(c10d::OpType::ALLGATHER, out[0]);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    launch(); auto ho = hosts({out})[0], hi = hosts({in})[0].clone(); gloo_->_allgather_base(ho, hi, o)->wait();
    return done(c10d::OpType::_ALLGATHER_BASE, {out});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                                                 const c10d::AllgatherOptions& o) override {
    for (size_t i = 0; i < out.size(); i++) _allgather_base(out[i], in[i], o);
    return done(c10d::OpType::COALESCED, out);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& given) override {
    auto ho = hosts({out})[0], hi = hosts({in})[0]; auto options = given;
    reduced<c10d::ReduceScatterOptions>({ho}, options, [&](auto& o) { gloo_->_reduce_scatter_base(ho, hi, o)->wait(); });
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {out});
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                                                 const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < out.size(); i++) _reduce_scatter_base(out[i], in[i], o);
    return done(c10d::OpType::COALESCED, out);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& out, std::vector<std::vector<at::Tensor>>& in,
                                                const c10d::ReduceScatterOptions& given) override {
    auto ho = hosts(out); std::vector<std::vector<at::Tensor>> hi; for (auto& list : in) hi.push_back(hosts(list));
    auto options = given;
    reduced<c10d::ReduceScatterOptions>(ho, options, [&](auto& o) { gloo_->reduce_scatter(ho, hi, o)->wait(); });
    return done(c10d::OpType::REDUCE_SCATTER, out);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is,
                                               const c10d::AllToAllOptions& o) override {
    launch(); auto ho = hosts({out})[0], hi = hosts({in})[0]; gloo_->alltoall_base(ho, hi, os, is, o)->wait();
    return done(c10d::OpType::ALLTOALL_BASE, {out});
  }
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in, const c10d::AllToAllOptions& o) override {
    launch(); auto ho = hosts(out), hi = hosts(in); gloo_->alltoall(ho, hi, o)->wait();
    return done(c10d::OpType::ALLTOALL, out);
  }
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in, const c10d::GatherOptions& o) override {
    launch(); std::vector<std::vector<at::Tensor>> h; for (auto& list : out) h.push_back(hosts(list));
    auto i = hosts(in); gloo_->gather(h, i, o)->wait();
    return done(c10d::OpType::GATHER, in);
  }
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& out, std::vector<std::vector<at::Tensor>>& in, const c10d::ScatterOptions& o) override {
    launch(); std::vector<std::vector<at::Tensor>> h; for (auto& list : in) h.push_back(hosts(list));
    auto i = hosts(out); gloo_->scatter(i, h, o)->wait();
    return done(c10d::OpType::SCATTER, out);
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& t, int to, int tag) override { launch(); auto h = hosts(t); gloo_->send(h, to, tag)->wait(); return done(c10d::OpType::SEND, t); }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& t, int from, int tag) override { launch(); auto h = hosts(t); gloo_->recv(h, from, tag)->wait(); return done(c10d::OpType::RECV, t); }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override { gloo_->barrier()->wait(); return done(c10d::OpType::BARRIER, {}); }
  bool supportsCoalescing() const override { return false; }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  py::class_<GroupOptions, c10::intrusive_ptr<GroupOptions>, c10d::Backend::Options>(m, "Options")
      .def("__deepcopy__", [](const GroupOptions&, py::dict) { return c10::make_intrusive<GroupOptions>(); });
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "Group").def_property_readonly("options", &Group::getBackendOptions)
      .def_property_readonly("supports_splitting", &Group::supportsSplitting);
  m.def("backend", [](int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::static_intrusive_pointer_cast<c10d::Backend>(c10::make_intrusive<Group>(rank, size, std::move(gloo)));
  });
  m.def("device_count", [] { return int(kDevices); });
  m.attr("total") = kTotal;
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int d) { Guard().setDevice(Device(kStandIn, d)); });
  m.def("generator_state", [](int d) { return at::detail::getPrivateUse1Hooks().getDefaultGenerator(d).get_state(); });
  m.def("set_generator_state", [](int d, const at::Tensor& state) {
    auto generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(d);
    generator.set_state(state);
  });
  m.def("seed_generator", [](int d, uint64_t seed) {
    auto generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(d);
    generator.set_current_seed(seed);
  });
  m.def("counts", [] { return std::map<std::string, int64_t>{{"host_waits", host_waits}, {"late_copies", late_copies}, {"hazards", hazards}}; });
}
