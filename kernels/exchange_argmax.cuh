// The most likely token of each row of logits that the GPUs of a group have columns of, each in its
// memory: a few bytes cross, and all GPUs know it.
//
// A team of thread blocks finds the best of a row's columns that are here, and sends it to all members,
// this one too, as two words of a number and the round. The team that is the last to do so waits for what
// the others send: so no block waits that keeps others of its GPU from beginning.
#pragma once
#include "exchange.cuh"
#include "sample_tokens.cuh"

struct AllArgMaxParams {
  ExchangeGroup group;
  SampleParams sample; // of this member's columns; ids are of all
  int rows;            // at most half of the words of an inbox
  int first;           // column of this member
};

__device__ __forceinline__ void allArgMax(const AllArgMaxParams& p) {
  __shared__ Team::Board shared;
  Team team;
  team.begin(shared);
  const int row = blockIdx.x / team.size;
  team.row(p.sample, row);
  beginExchange();
  const u64 found = team.best();
  teamWait();
  if (team.lane == 0) teamStore(&shared[0][0][team.warp], 0, found); // the first block alone needs it
  teamArrive();
  teamWait();
  if (team.warp != 0) return;
  u64 best = team.bestTold();
  if ((u32)(best >> 32) > NOTHING) best -= (u32)p.first; // ids are counted from the first member's on; see tokenOf

  const ExchangeGroup& g = p.group;
  Exchange round(g);
  if (team.lane < g.members && !round.failed) {
    const u64 t = (u64)round.tag << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1,%2};" ::"l"(round.words(team.lane, g.me, 2LL * row)), "l"(t | best >> 32), "l"(t | (u32)best) : "memory");
  }
  __syncwarp(); // who is counted has the number of the round
  u32 before = 0;
  if (team.lane == 0) asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(&round.state(g.me)->begun), "r"(p.rows - 1) : "memory");
  if (__shfl_sync(~0u, before, 0) != p.rows - 1) return;
  if (team.lane == 0) storeRelaxed(&round.state(g.me)->round, round.tag);
#pragma unroll 1
  for (int i = team.lane; i < p.rows; i += 32) {
    const u64* inbox = round.words(g.me, 0, 2LL * i);
    u64 key[EXCHANGE_MEMBERS], id[EXCHANGE_MEMBERS], most = 0;
    int missing;
    do { // all are asked for at the same time
#pragma unroll
      for (int m = 0; m < EXCHANGE_MEMBERS; m++)
        if (m < g.members) asm volatile("ld.relaxed.sys.global.v2.b64 {%0,%1}, [%2];" : "=l"(key[m]), "=l"(id[m]) : "l"(inbox + m * g.capacity) : "memory");
      missing = -1;
#pragma unroll
      for (int m = 0; m < EXCHANGE_MEMBERS; m++)
        if (m < g.members && ((u32)(key[m] >> 32) != round.tag || (u32)(id[m] >> 32) != round.tag)) missing = m;
    } while (missing >= 0 && round.more(missing));
#pragma unroll
    for (int m = 0; m < EXCHANGE_MEMBERS; m++)
      if (m < g.members) most = max(most, key[m] << 32 | (u32)id[m]);
    p.sample.ids[i] = round.failed ? -1 : idOf(most);
  }
}
