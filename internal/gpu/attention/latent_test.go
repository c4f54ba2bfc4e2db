package attention

import (
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// testLatent runs random problems of keys that hold the values: all types, numbers of rows, pages and schedules.
func testLatent(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	ran := map[string]int{}
	heads := []int{16, 64, 5, 32, 128, 1, 20}
	for i := range n {
		s := randomLatent(rng, heads[i%len(heads)], i < 2*len(heads), longest)
		o := options{kv: []attn.DType{attn.Float16, attn.BFloat16}[i/len(heads)%2], dense: rng.IntN(4) == 0, mixed: rng.IntN(5) == 0, shape: &s}
		m.runLatent(t, rng, plan, i, o, ran)
	}
	noError(t, plan.Close())
	for _, k := range []string{"latent_f16", "latent_bf16"} {
		if n >= 2*len(heads) && ran[k] == 0 {
			t.Errorf("no problem went to %s, but to %v", k, ran)
		}
	}
}

// randomLatent draws sequences of DeepSeek's latents, with one query each if one is true.
func randomLatent(rng *rand.Rand, heads int, one bool, longest int) reftest.Shape {
	s := reftest.Shape{Heads: heads, KVHeads: 1, Dim: latentDim, ValueDim: latentValue, Mask: attn.Mask{Causal: rng.IntN(3) > 0}}
	for range enginetest.Pick(rng, 1, 2, 3, 5) {
		queries := 1
		if !one {
			queries = enginetest.Pick(rng, 0, 1, 1, 2, 4)
		}
		s.Queries = append(s.Queries, queries)
		s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 15, 63, 64, 65, 127, 128, 129, 300, rng.IntN(longest)))
	}
	return s
}

// runLatent runs problem i of random ones, and counts the kernels in ran.
func (m *machine) runLatent(t *testing.T, rng *rand.Rand, plan *Plan, i int, o options, ran map[string]int) {
	t.Helper()
	in := enginetest.Pick(rng, reftest.AllInputs...)
	p := m.newProblem(t, rng, in, o)
	p.randomSchedule()
	p.geometry.Unfused = false
	m.run(t, plan, p)
	p.check(t)
	if t.Failed() {
		t.Fatalf("case %d, %v inputs: %v, schedule %+v", i, in, p, p.geometry)
	}
	for _, k := range plan.Kernels() {
		ran[k]++
	}
	p.close(t)
}

// groupedPages returns the format of keys whose first elements are values of E4M3 with scales.
func groupedPages(dim, value int) attn.Format {
	f := attn.Format{Planes: [attn.MostPlanes]attn.Plane{{DType: attn.E4M3, Dim: value, Scales: attn.ScalesByGroup, Group: latentGroup}}, KeyPlanes: 1, Value: attn.Columns{Dim: value}}
	if rest := dim - value; rest > 0 {
		f.Planes[1], f.KeyPlanes = attn.Plane{DType: attn.BFloat16, Dim: rest}, 2
	}
	return f
}

// testLatentSchedules: every schedule of one problem is correct.
func testLatentSchedules(t *testing.T, m *machine, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i, kv := range []attn.DType{attn.Float16, attn.BFloat16} {
		shape := reftest.Shape{Heads: 16 << i, KVHeads: 1, Dim: 576, ValueDim: 512, Queries: []int{1, 0, 2, 1}, Keys: []int{longest, 30, longest / 2, 0}, Mask: attn.Mask{Causal: true}}
		p := m.newProblem(t, rng, reftest.Peaked, options{shape: &shape, kv: kv})
		for _, policy := range []lean.Policy{{}, {Kind: lean.PerHead}, {Kind: lean.FixedSplit, Splits: 3}, {Kind: lean.FixedSplit, Splits: 100}} {
			for _, workers := range []int{0, 1, 3} {
				p.geometry.Policy, p.geometry.Workers = policy, workers
				m.Poison(t, &p.o)
				m.Poison(t, &p.lse)
				m.run(t, plan, p)
				p.check(t)
				if t.Failed() {
					t.Fatalf("%v, %+v, %d workers", p, policy, workers)
				}
			}
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// testLatentPasses: output tiles of few rows beside those of many, with queries in two parts, which take two passes over the keys.
func testLatentPasses(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	m.engine.Eager = true // parts of output tiles
	defer func() { m.engine.Eager = false }()
	plan, precise := m.engine.NewPlan(), 0
	for range reftest.AtLeast(2, func() bool { return precise > 0 }) {
		shape := reftest.Shape{Heads: 20, KVHeads: 1, Dim: 576, ValueDim: 512, Queries: []int{4, 1}, Keys: []int{500 + rng.IntN(64), 70}, Mask: attn.Mask{Causal: true}}
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: attn.Float16})
		m.run(t, plan, p)
		if p.check(t); p.query != p.kv {
			precise++
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// latentFamilies returns families of keys that hold the values: those of FlashInfer (test_deepseek_mla) and FlashMLA (test_flash_mla_dense_decoding), and offsets beyond 4 GiB.
func latentFamilies() []family {
	const f16, bf16 = attn.Float16, attn.BFloat16
	latent := func(r trial) trial { r.Dim, r.ValueDim = latentDim, latentValue; return r }
	varied, equal, pages := family{name: "latents of varied lengths"}, family{name: "latents in pages"}, family{name: "latents in pages of 64"}
	for i, keys := range [][]int{{0, 17, 514}, {1, 33, 2743}, {3, 79, 8736}, {11, 114, 8736}} {
		for j, queries := range []int{1, 3, 9, 17} {
			n := []int{1, 3, 5, 7}[(i+j)%4]
			var all []int
			for range n {
				all = append(all, keys...)
			}
			r := latent(ragged(f16, []int{16, 64}[(i+j)%2], 1, 0, 1, repeat(len(all), queries), all)).within(2e-3, 1e-3)
			varied.trials = append(varied.trials, r, r.causal())
		}
	}
	for i, keys := range []int{17, 33, 75, 197} {
		for j, queries := range []int{3, 7, 17} {
			n := []int{1, 2, 3, 4, 5, 6, 7, 157}[(3*i+j)%8]
			r := latent(batch(f16, n, []int{16, 64}[j%2], 1, 0, queries, keys, []int{16, 32}[i%2])).within(1e-3, 1e-3)
			r.spare = 40
			equal.trials = append(equal.trials, r, r.causal())
		}
	}
	for i, x := range []struct{ n, queries, keys, heads, kvHeads int }{
		{1, 1, 20, 1, 1}, {2, 2, 140, 3, 1}, {6, 4, 4096, 9, 3}, {64, 1, 4096, 64, 8}, {6, 4, 140, 63, 3}, {2, 4, 4096, 126, 2},
		{64, 2, 140, 128, 1}, {1, 4, 4096, 128, 8}, {128, 2, 4096, 16, 1}, {2, 1, 140, 126, 1},
	} {
		r := latent(batch([]attn.DType{bf16, f16}[i%2], x.n, x.heads, x.kvHeads, 0, x.queries, x.keys, 64)).sized(.1).within(8e-4, 2.01/128)
		for j := range r.Keys {
			if x.n > 1 {
				r.Keys[j] = max(0, r.Keys[j]*((j*37)%21-4)/10)
			}
		}
		pages.trials = append(pages.trials, r, r.causal())
	}
	far := func(r trial) trial { r.spare = 1 << 16; return r } // pages of 4.8 GB, a few of which are somebody's
	huge := family{"latents at offsets of more than 32 bits", []trial{far(latent(batch(bf16, 1, 16, 1, 0, 1, 3000, 64))), far(latent(ragged(f16, 20, 1, 0, 64, []int{2, 1}, []int{3000, 70}).causal()))}}
	return []family{varied, equal, pages, huge}
}

// testLatentPart: each half of DeepSeek's latents, as a KV head, goes to the kernel for halves if queries have the keys' type or are rounded to it.
func testLatentPart(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	ran := map[string]int{}
	heads := []int{128, 16, 5, 64, 20}
	for i := range reftest.AtLeast(n, func() bool { return n < 6 || ran["latent_part_f16"] > 0 && ran["latent_part_bf16"] > 0 }) {
		s := randomLatent(rng, heads[i%len(heads)], i%3 > 0, longest)
		if s.Dim, s.ValueDim = latentPartDim, latentPartValue; i%4 == 3 {
			s.Heads, s.KVHeads = 2*s.Heads, 2
		}
		o := options{kv: gpu.Halves[i%2], dense: rng.IntN(4) == 0, mixed: rng.IntN(2) == 0, shape: &s}
		m.runLatent(t, rng, plan, i, o, ran)
	}
	noError(t, plan.Close())
}

func TestGPULatent(t *testing.T) {
	m := realGPU(t)
	if !m.engine.hasEpilogue() {
		t.Skip("kernels for values in keys are those of 9.0")
	}
	testLatentPart(t, m, enginetest.OrShort(150, 30), 20000)
	testLatent(t, m, enginetest.OrShort(300, 60), 20000)
	testLatentSchedules(t, m, 3000)
	testLatentPasses(t, m)
	testFamilies(t, m, reftest.Rand(t), latentFamilies(), math.MaxInt)
}
