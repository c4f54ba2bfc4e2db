package attention

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestGPUAcceptance runs shapes of other attention kernels' test suites, with the tolerance of those suites or the
// derived bound, whichever is tighter.
//
// The trials do not cover:
//
//   - sliding windows, soft caps, ALiBi, sinks and masks
//   - keys and values of 8 bits; values of another dim than keys (TestGPULatent has those in keys)
//   - rotary embedding in the append
//   - head dims other than 64, 80, 96, 128 and 256
//   - keys whose rows do not follow each other, except pages of one token
//   - shared-prefix cascades
//   - merging partials of the caller, with or without a mask
//
// Invalid entries of a block table after the live entries never reach the GPU: Build does not copy them.
func TestGPUAcceptance(t *testing.T) { testAcceptance(t, realGPU(t), math.MaxInt) }

// family is trials of one kind.
type family struct {
	name   string
	trials []trial
}

func repeat(n, of int) []int { return slices.Repeat([]int{of}, n) }

// batch returns a trial of equal sequences.
func batch(kv attn.DType, n, heads, kvHeads, dim, queries, keys, page int) trial {
	return trial{kv: kv, page: page, Shape: reftest.Shape{Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, Queries: repeat(n, queries), Keys: repeat(n, keys)}}
}

// ragged returns a trial of given lengths.
func ragged(kv attn.DType, heads, kvHeads, dim, page int, queries, keys []int) trial {
	r := batch(kv, 0, heads, kvHeads, dim, 0, 0, page)
	r.Queries, r.Keys = queries, keys
	return r
}

func (r trial) within(atol, rtol float64) trial { r.atol, r.rtol = atol, rtol; return r }

func (r trial) lseWithin(x float64) trial { r.lseTolerance = x; return r }

func (r trial) causal() trial { r.Causal = true; return r }

func (r trial) by(p lean.Policy) trial { r.policy = p; return r }

func (r trial) sized(x float64) trial { r.size = x; return r }

func (r trial) appending() trial { r.append = true; return r }

// decodeFamilies returns families with one query a sequence.
func decodeFamilies() []family {
	const f16, bf16, f32 = attn.Float16, attn.BFloat16, attn.Float32
	short, few := family{name: "short"}, family{name: "fewer tiles than blocks"}
	for _, keys := range []int{2, 15, 16, 255, 256, 512} {
		short.trials = append(short.trials, batch(f16, 2, 4, 4, 64, 1, keys, 0).within(5e-3, 5e-3))
	}
	for heads := 1; heads <= 4; heads++ {
		for _, keys := range []int{64, 65, 200, 512} {
			few.trials = append(few.trials, batch(f16, 1, heads, heads, 64, 1, keys, 0).within(1e-2, 3e-3))
		}
	}
	long := family{"long", []trial{
		batch(f16, 1, 64, 64, 128, 1, 131072, 0).sized(.5).within(1e-2, 3e-3),
		batch(f16, 1, 64, 64, 64, 1, 262144, 0).sized(.5).within(1e-2, 3e-3),
		ragged(f16, 64, 64, 128, 0, repeat(3, 1), []int{4096, 32768, 65536}).within(1e-2, 3e-3),
		ragged(f16, 64, 64, 128, 16, repeat(3, 1), []int{4096, 32768, 30000}).within(1e-2, 3e-3),
	}}
	huge := family{"offsets of more than 32 bits", []trial{batch(f16, 1, 128, 128, 128, 1, 131072, 0).within(1e-2, 3e-3)}}
	paged, single := family{name: "paged"}, family{name: "one sequence"}
	for _, x := range []struct{ n, keys, page int }{{12, 54, 1}, {12, 97, 8}, {17, 512, 16}, {128, 54, 8}, {128, 512, 1}, {12, 2048, 16}, {17, 2048, 1}, {12, 16384, 16}} {
		for _, heads := range []int{4, 32} {
			for _, dim := range []int{128, 256} {
				paged.trials = append(paged.trials, batch(f16, x.n, heads, 4, dim, 1, x.keys, x.page).within(1e-3, 1e-3))
			}
		}
	}
	for _, keys := range []int{54, 128, 999, 32789} {
		for _, kvHeads := range []int{4, 8} {
			for _, group := range []int{1, 4, 8} {
				for _, dim := range []int{64, 128, 256} {
					single.trials = append(single.trials, batch(f16, 1, kvHeads*group, kvHeads, dim, 1, keys, 0).within(1e-3, 1e-3).lseWithin(1e-3))
				}
			}
		}
	}
	groups := family{name: "groups"}
	for _, group := range []int{3, 5, 6, 7, 10, 12, 16, 24, 32, 64} {
		for _, kv := range []attn.DType{f16, bf16, f32} {
			tolerance := 1e-3
			if kv == bf16 {
				tolerance = 1e-2
			}
			groups.trials = append(groups.trials, batch(kv, 1, 4*group, 4, 128, 1, 999, 16).within(tolerance, tolerance))
		}
	}
	throughput := family{name: "large batches"}
	for _, n := range []int{8, 16, 32} {
		for _, keys := range []int{512, 8192} {
			throughput.trials = append(throughput.trials, batch(f16, n, 32, 8, 128, 1, keys, 16).within(1e-2, 1e-2))
		}
	}
	empty := family{"a sequence without keys", []trial{
		ragged(f16, 32, 32, 128, 16, []int{1, 1}, []int{0, 9 * 16}).within(1e-3, 1e-3),
		ragged(f16, 32, 32, 128, 16, []int{1, 1, 1}, []int{9*16 - 3, 0, 0}).within(1e-3, 1e-3),
		ragged(bf16, 32, 8, 64, 0, []int{1, 1, 1}, []int{0, 0, 0}),
	}}
	return []family{short, few, long, huge, paged, single, groups, throughput, empty}
}

// chunkFamilies returns families with chunks of queries.
func chunkFamilies() []family {
	const f16, bf16, f32 = attn.Float16, attn.BFloat16, attn.Float32
	corners := family{name: "corners of caches"}
	add := func(x [2]int, kvHeads, dim int) {
		kv := []attn.DType{f16, bf16, f32}[len(corners.trials)%3]
		r := batch(kv, 2, 6, kvHeads, dim, x[0], x[1], []int{0, 1, 4, 128}[len(corners.trials)%4])
		corners.trials = append(corners.trials, r, r.causal(), r.causal().appending(), r.by(lean.Policy{Kind: lean.FixedSplit, Splits: 1}), r.causal().by(lean.Policy{Kind: lean.FixedSplit, Splits: 3}))
	}
	for _, dim := range headDims {
		for i, x := range [][2]int{{1, 128}, {1, 65}, {3, 129}, {1, 339}, {3, 1024}, {64, 800}, {64, 256}, {3, 799}, {64, 2048}, {128, 128}} {
			add(x, []int{6, 3, 1}[(i+dim/16)%3], dim)
		}
	}
	add([2]int{16, 20000}, 3, 128)
	add([2]int{16, 20000}, 1, 256)
	for _, r := range []trial{batch(f16, 2, 6, 1, 128, 1, 131072, 16), batch(bf16, 2, 6, 3, 64, 16, 131072, 0), batch(f16, 2, 6, 1, 256, 16, 131072, 128)} {
		corners.trials = append(corners.trials, r, r.causal())
	}

	var mixed family
	mixed.name = "mixed with prefill"
	for i, x := range []struct{ kvHeads, group, dim int }{{1, 1, 64}, {1, 4, 128}, {4, 7, 128}, {1, 8, 256}, {4, 8, 64}} {
		kv, page := []attn.DType{bf16, f16}[i%2], []int{1, 8, 16}[i%3]
		heads := x.kvHeads * x.group
		mixed.trials = append(mixed.trials,
			ragged(kv, heads, x.kvHeads, x.dim, page, []int{7939}, []int{8190}).causal().within(1e-2, 1e-2).lseWithin(1e-2),
			ragged(bf16, heads, x.kvHeads, x.dim, page, append(repeat(99, 2), 512), append(repeat(99, 766), 1024)).causal().within(1e-2, 1e-2),
			ragged(bf16, heads, x.kvHeads, x.dim, page, []int{235, 13353}, []int{2, 1}).causal().within(1e-2, 1e-2))
	}
	many := ragged(bf16, 8, 2, 128, 16, append(repeat(264, 1), repeat(128, 3)...), append(repeat(264, 600), repeat(128, 5000)...))
	mixed.trials = append(mixed.trials, many.within(1e-2, 1e-2), many.causal().within(1e-2, 1e-2))

	varied := family{name: "ragged and paged"}
	for i, heads := range [][2]int{{4, 4}, {8, 2}, {5, 1}} {
		for j, dim := range headDims {
			queries, keys := []int{1, 5, 129}, []int{1328, 18, 463}
			if (i+j)%2 == 0 {
				queries, keys = []int{1, 1, 1}, []int{523, 37, 2011}
			}
			r := ragged(bf16, heads[0], heads[1], dim, 16, queries, keys).causal().within(1.5e-2, 1e-2)
			r.spare = 500
			if i == 1 && dim == 128 {
				r.spare = 32768
			}
			varied.trials = append(varied.trials, r)
		}
	}

	pages := family{name: "few queries in pages of 64"}
	for i, x := range []struct{ n, queries, keys, heads, kvHeads, dim int }{
		{1, 1, 20, 1, 1, 64}, {2, 2, 140, 3, 3, 80}, {6, 4, 4096, 9, 3, 96}, {64, 1, 4096, 64, 8, 128}, {6, 4, 140, 63, 3, 256},
		{2, 4, 4096, 126, 2, 128}, {64, 2, 140, 128, 1, 64}, {1, 4, 4096, 128, 8, 256}, {128, 2, 4096, 16, 1, 128},
	} {
		r := batch([]attn.DType{bf16, f16}[i%2], x.n, x.heads, x.kvHeads, x.dim, x.queries, x.keys, 64).sized(.1).within(8e-4, 2.01/128)
		if x.n > 1 { // about half the contexts have another length, and some of them 0
			for j := range r.Keys {
				r.Keys[j] = max(0, r.Keys[j]*((j*37)%21-4)/10)
			}
		}
		pages.trials = append(pages.trials, r, r.causal())
	}
	serving := family{name: "serving"}
	for _, x := range []struct{ n, queries, page, kvHeads, group, keys int }{
		{4, 4, 64, 4, 2, 110}, {4, 2, 16, 2, 4, 110}, {4, 3, 32, 2, 6, 300}, {4, 1, 16, 2, 1, 30000}, {4, 1, 32, 2, 5, 30000},
		{128, 1, 64, 2, 6, 300}, {256, 1, 64, 4, 8, 300}, {4, 4, 32, 2, 16, 300},
	} {
		for _, kv := range []attn.DType{f16, bf16} {
			serving.trials = append(serving.trials, batch(kv, x.n, x.kvHeads*x.group, x.kvHeads, 128, x.queries, x.keys, x.page).causal().within(1e-2, 1e-2))
		}
	}
	return []family{corners, mixed, varied, pages, serving}
}

// testAcceptance runs trials of at most cost most.
func testAcceptance(t *testing.T, m *machine, most int) {
	rng := reftest.Rand(t)
	testFamilies(t, m, rng, append(decodeFamilies(), chunkFamilies()...), most)
	t.Run("schedules", func(t *testing.T) { testDegenerate(t, m, rng, most) })
	t.Run("poison", func(t *testing.T) { testPoison(t, m, rng, most) })
	t.Run("batch invariance", func(t *testing.T) { testInvariance(t, m, rng, most) })
	t.Run("packed", func(t *testing.T) { testPacked(t, m, rng, most) })
}

func testFamilies(t *testing.T, m *machine, rng *rand.Rand, families []family, most int) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			for _, r := range f.trials {
				if r.cost() > most {
					continue
				}
				t.Run(r.String(), func(t *testing.T) { testTrial(t, m, rng, r) })
			}
		})
	}
}

func testTrial(t *testing.T, m *machine, rng *rand.Rand, r trial) {
	s := m.setUp(t, rng, r)
	defer s.close(t)
	out, lse := s.run(t, s.seqs)
	s.check(t, rng, out, lse)
	if r.append {
		s.checkCache(t)
	}
}

// testDegenerate: as many LeanTiles as thread blocks, one more, one fewer, and none.
func testDegenerate(t *testing.T, m *machine, rng *rand.Rand, most int) {
	for _, workers := range []int{1, 2, m.engine.blocks} {
		for _, tiles := range []int{0, 1, 2, workers - 1, workers, workers + 1} {
			r := batch(attn.Float16, 1, 1, 1, 64, 1, max(tiles*defaultTile-rng.IntN(defaultTile), min(tiles, 1)), 16)
			if r.cost() > most {
				continue
			}
			s := m.setUp(t, rng, r)
			for _, policy := range []lean.Policy{{}, {Kind: lean.FixedSplit, Splits: 5}, {Kind: lean.PerHead}} {
				s.geometry.Workers, s.geometry.Policy = workers, policy
				out, lse := s.run(t, s.seqs)
				s.check(t, rng, out, lse)
				if n := s.plan.sched.Tiles(); n != int64(tiles) || s.plan.sched.Workers() > max(workers, 1) {
					t.Errorf("%d LeanTiles of %d, %d workers of %d", n, tiles, s.plan.sched.Workers(), workers)
				}
			}
			s.close(t)
		}
	}
}

// testPoison: NaN in memory that must not be read changes no bit.
func testPoison(t *testing.T, m *machine, rng *rand.Rand, most int) {
	for i, dim := range headDims {
		for _, r := range []trial{
			ragged(attn.Float16, 8, 2, dim, 16, []int{1, 5, 129}, []int{1328, 18, 463}).causal(),
			ragged([]attn.DType{attn.BFloat16, attn.Float32}[i%2], 5, 1, dim, 16, []int{1, 1, 1}, []int{523, 37, 2011}),
			ragged(attn.Float16, 4, 4, dim, 0, []int{1, 2}, []int{77, 130}),
		} {
			if r.cost() > most {
				continue
			}
			r.spare = 40
			s := m.setUp(t, rng, r)
			out, lse := s.run(t, s.seqs)
			s.check(t, rng, out, lse)
			s.fill(t, 0)
			if o, l := s.run(t, s.seqs); !bytes.Equal(o, out) || !bytes.Equal(l, lse) {
				t.Errorf("%v: NaN in dead memory made a difference", r)
			}
			s.close(t)
		}
	}
}

// testInvariance: an output tile that is the first and only work of a thread block has the same bits in any batch.
func testInvariance(t *testing.T, m *machine, rng *rand.Rand, most int) {
	compared := 0
	for i, keys := range []int{40, 4096, 5000, 8192} {
		for _, n := range []int{5, 12} {
			for _, group := range []int{1, 4, 8} {
				for _, dim := range []int{64, 128, 256} {
					r := batch([]attn.DType{attn.Float16, attn.BFloat16}[i%2], n, 4*group, 4, dim, 1, keys, []int{1, 8, 16}[i%3])
					if r.cost() > most {
						continue
					}
					s := m.setUp(t, rng, r)
					for _, policy := range []lean.Policy{{Kind: lean.PerHead}, {}} {
						s.geometry.Policy = policy
						out, lse := s.run(t, s.seqs)
						s.check(t, rng, out, lse)
						alone := s.alone()
						few, fewLSE := s.run(t, s.seqs[:4])
						for tile := range s.alone() {
							if !alone[tile] {
								continue
							}
							compared++
							head := s.seqs[tile[0]].Row*r.Heads + tile[1]*group
							size := dim * s.kv.Size()
							if !bytes.Equal(out[head*size:(head+group)*size], few[head*size:(head+group)*size]) || !bytes.Equal(lse[head*4:(head+group)*4], fewLSE[head*4:(head+group)*4]) {
								t.Errorf("%v: sequence %d, KV head %d has other bits in a batch of 4", r, tile[0], tile[1])
							}
						}
					}
					s.close(t)
				}
			}
		}
	}
	if compared == 0 {
		t.Error("nothing was compared")
	}
}

// alone returns the sequences and KV heads whose output tile is the first of a thread block and whole in it.
func (r *setup) alone() map[[2]int]bool {
	all := map[[2]int]bool{}
	for b := range r.plan.sched.Workers() {
		it := r.plan.sched.Work(b)
		if k, ok := it.Next(); ok && k.Whole() {
			all[[2]int{k.Seq, k.Head}] = true
		}
	}
	return all
}

// testPacked: queries, keys and values share the rows of one buffer, which are pages of one token.
func testPacked(t *testing.T, m *machine, rng *rand.Rand, most int) {
	all := [][2]int{{4, 1}, {4, 4}, {8, 1}, {8, 4}, {8, 8}}
	for i, n := range []int{1, 19, 99} {
		ran := 0
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for _, heads := range all[:reftest.Cases(t, 1, len(all))] {
			for _, dim := range headDims {
				r := batch(attn.Float16, n, heads[0], heads[1], dim, 1, 1+i%2, 1).within(1e-3, 1e-3)
				if r.cost() > most || m.Few(t) && ran > 0 && rng.IntN(2) == 0 {
					continue
				}
				testPackedTrial(t, m, rng, r)
				ran++
			}
		}
	}
}

func testPackedTrial(t *testing.T, m *machine, rng *rand.Rand, r trial) {
	s := m.setUp(t, rng, r)
	out, lse := s.run(t, s.seqs)
	s.check(t, rng, out, lse)
	size := r.kv.Size()
	q, k, v := enginetest.Read(t, &s.q), enginetest.Read(t, &s.k), enginetest.Read(t, &s.v)
	wide, narrow := r.Heads*r.Dim*size, r.KVHeads*r.Dim*size
	width := wide + 2*narrow
	rows := max(s.rows, len(s.owner))
	b := bytes.Repeat([]byte{0xff}, rows*width)
	for i := range rows {
		row := b[i*width:]
		if i < s.rows {
			copy(row, q[i*wide:(i+1)*wide])
		}
		if i < len(s.owner) {
			copy(row[wide:], k[i*narrow:(i+1)*narrow])
			copy(row[wide+narrow:], v[i*narrow:(i+1)*narrow])
		}
	}
	old := [3]gpu.Memory{s.q, s.k, s.v}
	s.q = m.Put(t, b, r.kv)
	part := func(from int) gpu.Memory {
		x := s.q
		x.Offset += int64(from)
		x.Len -= from / size
		return x
	}
	s.k, s.v = part(wide), part(wide+narrow)
	s.geometry.Query.Row = width / size
	s.geometry.Pages.Planes[0].At.Page = width / size
	s.geometry.Pages.Planes[1].At = s.geometry.Pages.Planes[0].At
	o, l := s.run(t, s.seqs)
	if !bytes.Equal(o, out) || !bytes.Equal(l, lse) {
		t.Errorf("%v: packed rows give other bits", fmt.Sprint(r))
	}
	noError(t, s.q.Buffer.Close())
	s.q, s.k, s.v = old[0], old[1], old[2]
	s.close(t)
}
