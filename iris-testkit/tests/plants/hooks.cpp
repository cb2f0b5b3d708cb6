// The protocols once through the headers, and a kernel, with hooks that say where an access of a peer's word
// has not system scope. Addresses from 2^60 on are symmetric. Exits with 1 if one was found.
#include <cstdio>
#include <cstdlib>

#include "iris/sync.h"

using namespace iris;

static bool wrong = false;

static void see(u64 address, int scope, const char* what) {
    if (address >> 60 != 1 || scope == 1) return;
    std::printf("%s of a peer's word at scope %d\n", what, scope);
    wrong = true;
}

extern "C" {
u32 iris_hook_lane() { return 0; }
u32 iris_hook_lanes() { return 1; }
u32 iris_hook_workgroup() { return 0; }
u32 iris_hook_workgroups() { return 1; }
int iris_hook_vote(int ok, int) { return ok; }
u64 iris_hook_now() { return 0; }
void iris_hook_pause(u32) {}
int iris_hook_expired(int, u32, u64) { return 1; }
int iris_hook_reached(int, i32, i32, int) { return 1; }
i32 iris_hook_host_abort(u64) { return 0; }
void iris_hook_record(u64, const i32*) {}
i32 iris_hook_load32(u64 a, int, int s, int) { see(a, s, "load"); return 0; }
void iris_hook_store32(u64 a, i32, int, int s, int) { see(a, s, "store"); }
i32 iris_hook_rmw32(u64 a, int, i32, int, int s, int) { see(a, s, "rmw"); return 0; }
i32 iris_hook_cas32(u64 a, i32, i32, int, int s, int) { see(a, s, "cas"); return 0; }
i64 iris_hook_load64(u64 a, int, int s, int) { see(a, s, "load"); return 0; }
void iris_hook_store64(u64 a, i64, int, int s, int) { see(a, s, "store"); }
i64 iris_hook_rmw64(u64 a, int, i64, int, int s, int) { see(a, s, "rmw"); return 0; }
i64 iris_hook_cas64(u64 a, i64, i64, int, int s, int) { see(a, s, "cas"); return 0; }
void iris_hook_add_f32(u64 a, float, int s) { see(a, s, "add"); }
void iris_hook_fence(int, int) {}
void iris_hook_read(u64, void* value, u32 bytes) {
    for (u32 i = 0; i < bytes; ++i) static_cast<char*>(value)[i] = 0;
}
void iris_hook_write(u64, const void*, u32) {}
void* iris_hook_shared(u64 bytes) { return std::malloc(bytes); }
}

#include "barrier.cu"

int main() {
    const u64 symmetric = 1ull << 60, device = 2ull << 60;
    HeapView heap{};
    heap.size = 2;
    for (u32 rank = 0; rank < 2; ++rank) heap.signal[rank] = heap.data[rank] = symmetric;
    heap.device_words = device;
    Channel channel{};
    channel.size = 2;
    channel.tiles = 32;
    channel.flag_count = 1;
    const Record record{};
    const Launch launch{heap, channel, record, 0, 1, Trace(0, 0, 0, 0)};
    Workgroup wg(launch);
    bool ok = wg.enter();
    wg.push_signal(1, 0);
    wg.push_results(Members{2}, 0);
    ok &= wg.wait_tile(1, 0) && wg.wait_result(1, 0) && wg.locked(1, 0, [] {});
    ok &= wg.barrier(0, Members::all(2));
    wg.raise_flag(0);
    ok &= wg.wait_flag(0, 1);
    ok &= wg.finish(End::Pulled, ok);
    lock::publish_version(wg.m, wg.m.signal(1, 0, 0), wg.call());
    OpArgs args{};
    args.heap = heap;
    args.channel = channel;
    iris_barrier(args, 0, 3, 1);
    return wrong ? 1 : ok ? 0 : 2;
}
