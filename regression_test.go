package leanattention_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
)

// The tests here hold results to the last bit. A change that is to alter no result
// must pass them as they are; one that is to alter results writes the file again:
//
//	for tier in go avx2 avx512 amx; do LEANATTENTION_CPU=$tier go test -count=1 -run TestDigests . -digests; done # on a machine that has them
//	LEANATTENTION_GPU=emulated go test -count=1 -run TestGPUDigests . -digests

const digestFile = "testdata/digests.json"

var writeDigests = flag.Bool("digests", false, "write "+digestFile+" in place of comparing with it")

// digests are of the results of problems, in the order in which they are computed.
// All numbers come from a fixed seed.
type digests struct {
	rng   *rand.Rand
	found []string
}

func newDigests() *digests { return &digests{rng: rand.New(rand.NewPCG(2405, 10480))} }

// add adds the digest of some results.
func (d *digests) add(t testing.TB, results ...G.Value) {
	t.Helper()
	h := fnv.New32a()
	for _, r := range results {
		for _, b := range graphtest.Bits(t, r) {
			h.Write(binary.LittleEndian.AppendUint64(nil, b))
		}
	}
	d.found = append(d.found, hex.EncodeToString(h.Sum(nil)))
}

// compare compares the digests with those of the file, by the name of what computed them.
func (d *digests) compare(t *testing.T, name string) {
	t.Helper()
	file := map[string][]string{}
	if data, err := os.ReadFile(digestFile); err == nil {
		if err := json.Unmarshal(data, &file); err != nil {
			t.Fatal(err)
		}
	} else if !*writeDigests {
		t.Fatal(err)
	}
	if *writeDigests {
		file[name] = d.found
		data, err := json.MarshalIndent(file, "", "")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(digestFile, append(data, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, ok := file[name]
	if !ok {
		t.Skipf("%s has no digests of %s", digestFile, name)
	}
	if len(want) != len(d.found) {
		t.Fatalf("%s: %d results; the file has %d", name, len(d.found), len(want))
	}
	var differ []int
	for i, w := range want {
		if d.found[i] != w {
			differ = append(differ, i)
		}
	}
	if differ != nil {
		t.Errorf("%s: %d of %d results have other bits: %v", name, len(differ), len(want), differ)
	}
}

// TestDigests: what the CPU computes has the same bits as when the file was written.
func TestDigests(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the detector looks for races, of which one run more shows no others")
	}
	d := newDigests()
	for i := range 300 {
		p, opts := d.problem(i)
		a := p.Args()
		if err := la.Attend(a, opts...); err != nil {
			t.Fatalf("%v: %v", p.Shape, err)
		}
		d.add(t, a.Out, a.LSE)
	}
	for i := range 100 {
		d.gradients(t, i)
	}
	for i := range 25 { // of four steps
		d.decode(t, i, graphtest.Place{})
	}
	if err := cpu.CheckTier(); err != nil {
		t.Fatal(err)
	}
	d.compare(t, runtime.GOARCH+" "+cpu.InUse().String())
}

// problem draws a problem for [la.Attend], and its options.
func (d *digests) problem(i int) (*graphtest.Problem, []la.Option) {
	s := reftest.RandomShape(d.rng)
	s.Queries = graphtest.Repeated(len(s.Keys), max(s.Queries[0], 1))
	if i%2 == 1 {
		s = reftest.RandomWindowCapSlopes(d.rng, s)
	}
	x := graphtest.Spec{Inputs: reftest.AllInputs[i%4], QueryType: elementTypes[i%8][0], KVType: elementTypes[i%8][1], Capacity: max(slices.Max(s.Keys)+d.rng.IntN(3), 1)}
	if i%3 == 2 {
		s = reftest.RandomBias(d.rng, s, x.Capacity)
	}
	p := graphtest.NewProblem(d.rng, s, x)
	return p, append(p.Options(), d.options(i)...)
}

// options draws a schedule. The workers are given, since bits depend on their number.
func (d *digests) options(i int) []la.Option {
	return []la.Option{la.WithTileTokens(d.rng.IntN(100)), la.WithWorkers(1 + d.rng.IntN(8)), la.WithSchedule(graphtest.Schedules[i%3])}
}

// gradients adds the gradients of a problem whose cost is the sum of its output.
func (d *digests) gradients(t *testing.T, i int) {
	t.Helper()
	s := reftest.RandomShape(d.rng)
	s.Queries = graphtest.Repeated(len(s.Keys), max(s.Queries[0], 1))
	if i%2 == 1 {
		s = reftest.RandomWindowCapSlopes(d.rng, s)
	}
	types := elementTypes[i%2*4] // float32 and float64
	p := graphtest.NewProblem(d.rng, s, graphtest.Spec{Inputs: reftest.AllInputs[i%4], QueryType: types[0], KVType: types[1]})
	g := p.Attention(t, d.options(i)...)
	wrt := G.Nodes{g.Q, g.K, g.V}
	grads, err := G.Grad(G.Must(G.Sum(g.Out)), wrt...)
	if err != nil {
		t.Fatal(err)
	}
	values := make([]G.Value, len(grads))
	for j, n := range grads {
		G.Read(n, &values[j])
	}
	g.Run(t)
	d.add(t, values...)
}

// decode adds the outputs of some steps of a cache.
func (d *digests) decode(t *testing.T, i int, at graphtest.Place) {
	t.Helper()
	const prompt = 40
	geometries := [][4]int{{2, 2, 16, 16}, {6, 2, 8, 20}, {7, 1, 40, 24}, {4, 4, 3, 1}, {12, 3, 59, 59}, {5, 1, 80, 64}}
	if at.Real {
		geometries = [][4]int{{2, 2, 64, 64}, {6, 2, 80, 80}, {7, 1, 96, 96}, {12, 3, 128, 128}, {16, 1, 64, 64}, {3, 3, 256, 256}}
	}
	g := geometries[i%len(geometries)]
	pageSize := []int{1, 3, 16, 64}[i%4]
	queries := at.Queries()
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: g[1], HeadDim: g[2], ValueDim: g[3], DType: cacheTypes[i%3], PageSize: pageSize, Pages: 4*prompt/pageSize + 16, Device: at.GPU})
	la.PoisonFree(cache)
	prefill := graphtest.NewDecoderAt(t, at, cache, prompt+2, g[0], queries[i%len(queries)], true, d.options(i)...)
	decode := graphtest.NewDecoderAt(t, at, cache, 2, g[0], queries[i%len(queries)], true, d.options(i)...)
	a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
	prefill.Do(t, d.rng, reftest.AllInputs[i%4], graphtest.Appended{To: a, Tokens: prompt - i}, graphtest.Appended{To: b, Tokens: 1 + i})
	d.add(t, prefill.OutValues[0], prefill.LSEValues[0])
	for range 3 {
		decode.Do(t, d.rng, reftest.AllInputs[i%4], graphtest.Appended{To: b, Tokens: 1}, graphtest.Appended{To: a, Tokens: 1})
		d.add(t, decode.OutValues[0], decode.LSEValues[0])
	}
	closeCache(t, cache)
}

// TestGPUDigests: what an emulated GPU computes has the same bits as when the file was
// written. A GPU's own exponentials differ from those of the emulator.
func TestGPUDigests(t *testing.T) {
	if os.Getenv("LEANATTENTION_GPU") != "emulated" {
		t.Skip("the file has digests of the emulator's results alone")
	}
	gpu := devicetest.Open(t)
	d, at := newDigests(), graphtest.Place{GPU: gpu, Real: true}
	dims := []int{64, 80, 96, 128, 256}
	for i := range 100 {
		s := reftest.RandomShape(d.rng)
		s.Queries = graphtest.Repeated(len(s.Keys), max(min(s.Queries[0], 5), 1))
		s.Dim = dims[i%5]
		s.ValueDim = s.Dim
		s.Heads = s.KVHeads * (1 + d.rng.IntN(16))
		x := graphtest.Spec{Inputs: reftest.AllInputs[i%4], Capacity: max(slices.Max(s.Keys), 1)}
		x.QueryType, x.KVType = deviceElements(i)
		p := graphtest.NewProblem(d.rng, s, x)
		out, lse := p.AttendThere(t, gpu, d.options(i)...)
		d.add(t, out, lse)
	}
	for i := range 12 {
		at.There = i%2 == 0
		d.decode(t, i, at)
	}
	d.compare(t, fmt.Sprint("emulated GPU, PTX ", os.Getenv("LEANATTENTION_PTX")))
}
