package gpu

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestGPUCases: the shapes and bars are those that were asked for.
func TestGPUCases(t *testing.T) {
	least := func(b *measure.Bar) float64 {
		if b == nil || b.Least == nil {
			return 0
		}
		return *b.Least
	}
	most := func(b *measure.Bar) float64 {
		if b == nil || b.Most == nil {
			return 0
		}
		return *b.Most
	}
	type bars struct{ share, micros, flash float64 }
	want := map[string]bars{
		"b6, 48 heads x 4096 x 64":     {0.98, 0, 2.9}, // 302 MB
		"b6, 48 heads x 16384 x 64":    {0.98, 0, 2.9},
		"b6, 48 heads x 65536 x 64":    {0.98, 0, 2.9},
		"b1, 32 heads x 1024 x 64":     {0, 7, 0},
		"b1, 32/8 heads x 8192 x 128":  {0, 13, 0},
		"b16, 32/8 heads x 1024 x 128": {0, 18, 0},
		"b16, 32/8 heads x 8192 x 128": {},
		"b64, 64/8 heads x 4096 x 128": {},
		"b1, 1 heads x 1048576 x 64":   {0.90, 0, 0},
	}
	for _, c := range namedCases() {
		w, ok := want[c.shape.String()]
		if got := (bars{least(c.share), most(c.micros), least(c.flash)}); !ok || got != w {
			t.Errorf("%v: bars %v, want %v", c.shape, got, w)
		}
		if least(c.paged) != 0.97 || !slices.Equal(c.pages, []int{16, 64}) || c.table != tableNamed {
			t.Errorf("%v: pages of %v, bar %v", c.shape, c.pages, c.paged)
		}
		delete(want, c.shape.String())
	}
	if len(want) > 0 {
		t.Errorf("without %v", want)
	}

	var keys []int64
	for _, c := range raggedCases() {
		keys = append(keys, c.shape.keys())
		if most(c.ragged) != 1 || c.shape.even() || len(c.pages) == 0 {
			t.Errorf("%v: %+v", c.shape, c)
		}
	}
	if want := []int64{131072 + 31*1024, 131072 + 31*1024, 310869}; !slices.Equal(keys, want) {
		t.Errorf("ragged batches of %v keys, want %v", keys, want)
	}
	for _, c := range groupCases() {
		if !slices.Equal(c.groups, []int{2, 4, 5, 7, 8, 16}) || most(c.grouped) != 1.03 || c.shape.heads != c.shape.kvHeads {
			t.Errorf("%v: %+v", c.shape, c)
		}
	}
}

func TestGPUSweep(t *testing.T) {
	all := sweepCases()
	// 11 pairs of heads, 5 batches, 5 contexts, 2 dims; without 6 that have names.
	if n := len(all); n != 550-6 {
		t.Errorf("%d shapes", n)
	}
	seen := make(map[string]bool)
	for _, c := range append(all, namedCases()...) {
		if is := c.shape.String(); seen[is] {
			t.Errorf("%s twice", is)
		} else {
			seen[is] = true
		}
		long := c.shape.heads == c.shape.kvHeads && c.shape.Bytes() >= 300_000_000
		if c.table == tableSweep && (c.share != nil) != long {
			t.Errorf("%v: bar %v", c.shape, c.share)
		}
		s := c.shape
		full := s.Launches() >= 20 || s.Launches() >= 4 && int64(s.Launches())*s.Bytes() >= gpuGraph
		if !full || s.Launches()%s.Sets() != 0 || s.rotation() < gpuRotation {
			t.Errorf("%v: %d launches of %d sets", s, s.Launches(), s.Sets())
		}
	}
	picked, sum := within(all, time.Minute), time.Duration(0)
	for i, c := range picked {
		sum += c.cost()
		if again := within(all, time.Minute)[i]; again.shape.String() != c.shape.String() {
			t.Errorf("case %d is %v and %v", i, c.shape, again.shape)
		}
	}
	if sum > time.Minute || sum < 50*time.Second || len(picked) < 30 {
		t.Errorf("%d cases in %v", len(picked), sum)
	}
	if n := len(within(all, 0)); n != 0 {
		t.Errorf("%d cases in no time", n)
	}
}

// TestGPUPart: every shape is in one part, and each part has some of all sizes.
func TestGPUPart(t *testing.T) {
	all := sweepCases()
	var none gpuPart
	if n := len(none.of(all)); n != len(all) || !none.first() || none.String() != "" {
		t.Errorf("no part is %d shapes of %d, %q", n, len(all), none.String())
	}
	for _, parts := range []int{1, 2, 3, 5} {
		seen := make(map[string]int)
		for k := 1; k <= parts; k++ {
			var p gpuPart
			if err := p.Set(fmt.Sprintf("%d/%d", k, parts)); err != nil || p.first() != (k == 1) || p.String() != fmt.Sprintf("%d/%d", k, parts) {
				t.Fatalf("part %d of %d is %v (%v)", k, parts, p.String(), err)
			}
			var cost, whole time.Duration
			for _, c := range p.of(all) {
				seen[c.shape.String()]++
				cost += c.cost()
			}
			for _, c := range all {
				whole += c.cost()
			}
			if even := whole / time.Duration(parts); cost < even/2 || cost > even*2 {
				t.Errorf("part %v takes %v of %v", p.String(), cost, whole)
			}
		}
		for is, n := range seen {
			if n != 1 {
				t.Errorf("%s is in %d of %d parts", is, n, parts)
			}
		}
		if len(seen) != len(all) {
			t.Errorf("%d parts have %d shapes of %d", parts, len(seen), len(all))
		}
	}
	for _, text := range []string{"", "1", "0/2", "3/2", "a/b", "1/2/3", "/"} {
		if err := new(gpuPart).Set(text); err == nil {
			t.Errorf("%q is a part", text)
		}
	}
}

func TestGPUMatch(t *testing.T) {
	var o Options
	if all := sweepCases(); len(o.matching(all)) != len(all) {
		t.Error("no expression leaves something out")
	}
	o.match = regexp.MustCompile(`^b6, 48/8 heads x 1024 x|^B:`)
	var names []string
	for _, c := range o.matching(slices.Concat(namedCases(), raggedCases(), sweepCases())) {
		names = append(names, c.shape.String())
	}
	want := []string{"B: 131072 and 31 x 1024, 32/8 heads of 128", "b6, 48/8 heads x 1024 x 64", "b6, 48/8 heads x 1024 x 128"}
	if !slices.Equal(names, want) {
		t.Errorf("%q match, want %q", names, want)
	}
	for _, args := range [][]string{{"gpu", "-match", "("}, {"gpu", "-part", "2/1"}} {
		var stdout, stderr strings.Builder
		if status := command.Run(Commands, args, &stdout, &stderr); status != 2 || !strings.Contains(stderr.String(), args[1]) {
			t.Errorf("%q: status %d, %q", args, status, stderr.String())
		}
	}
}

// TestGPULayOut: sequences have pages of their own, all inside the memory.
func TestGPULayOut(t *testing.T) {
	rng := measuretest.Rand(t)
	ragged := Shape{heads: 6, kvHeads: 3, dim: 64, lengths: []int{1, 16, 17, 100, 64}}
	for _, c := range []struct {
		s    Shape
		page int
	}{{EvenShape(3, 4, 2, 48, 64), 0}, {EvenShape(3, 4, 2, 48, 64), 16}, {ragged, 16}, {ragged, 64}} {
		p := layOut(c.s, c.page, rng)
		if 4*p.elements > c.s.Region() {
			t.Errorf("%v: %d elements in %d bytes", c.s, p.elements, c.s.Region())
		}
		seen := make(map[int32]bool)
		for i, s := range p.seqs {
			if s.Keys != c.s.lengths[i] || s.Queries != 1 || s.Row != i || len(s.Pages)*p.geometry.PageTokens < s.Keys {
				t.Errorf("%v: sequence %d is %+v", c.s, i, s)
			}
			for _, n := range s.Pages {
				if seen[n] || int64(n+1)*int64(p.geometry.Pages.Planes[0].At.Page) > p.elements {
					t.Errorf("%v: sequence %d has page %d", c.s, i, n)
				}
				seen[n] = true
			}
		}
		if int64(len(seen)*p.geometry.Pages.Planes[0].At.Page) != p.elements {
			t.Errorf("%v: %d pages of %d elements", c.s, len(seen), p.elements)
		}
	}
}

// TestGPUReference: with keys that all score alike the output is the values' mean,
// and with one that scores much more, its value.
func TestGPUReference(t *testing.T) {
	for _, page := range []int{0, 16} {
		s := EvenShape(2, 4, 2, 40, 64)
		p := layOut(s, page, measuretest.Rand(t))
		d := &gpuDevice{rng: measuretest.Rand(t), host: make([]half.Float16, 3*p.elements)}
		const begin, seq, head = 64, 1, 3
		place := func(j int) int64 {
			tokens := p.geometry.PageTokens
			n := int64(p.seqs[seq].Pages[j/tokens])
			return begin + n*int64(2*tokens*64) + int64(tokens*64+j%tokens*64) // of KV head 1
		}
		for i := range d.host {
			d.host[i] = half.FromFloat32(float32(math.NaN()))
		}
		for j := range 40 {
			for i := range 64 {
				d.host[place(j)+int64(i)] = 0
				d.host[place(j)+p.elements+int64(i)] = half.FromFloat32(float32(j + 1))
			}
		}
		query := slices.Repeat([]float64{math.MaxInt8}, 64)
		if got := d.reference(&p, seq, head, 40, begin, query); !measuretest.Near(got[0], 20.5) || !measuretest.Near(got[63], 20.5) {
			t.Errorf("pages of %d: the mean is %v", page, got)
		}
		if got := d.reference(&p, seq, head, 10, begin, query); !measuretest.Near(got[0], 5.5) {
			t.Errorf("pages of %d: the first keys' mean is %v", page, got)
		}
		d.host[place(39)+5] = half.FromFloat32(100)
		if got := d.reference(&p, seq, head, 40, begin, query); !measuretest.Near(got[0], 40) {
			t.Errorf("pages of %d: the last key's value is %v", page, got[0])
		}
	}
}

// TestGPUPrefillCases: the cases are those that there are bars for, and fit a GPU of 80 GB.
func TestGPUPrefillCases(t *testing.T) {
	var names []string
	for _, c := range prefillCases() {
		names = append(names, c.String())
		if c.shape.Region() > 4<<30 || c.launches() < 1 || c.launches() > 20 || len(c.queries) != c.shape.batch() {
			t.Errorf("%s: %d bytes, %d launches, %d sequences", &c, c.shape.Region(), c.launches(), len(c.queries))
		}
		if c.mixed() != (c.table == tableMixed) || (c.best != nil) != (c.table == tableChunks) || (c.precise != nil) == (c.table == tableMixed) {
			t.Errorf("%s is in table %s", &c, c.table)
		}
	}
	want := []string{
		"16 x 1024, 32 heads of 64, causal", "4 x 4096, 32 heads of 64, causal", "1 x 16384, 32 heads of 64, causal",
		"16 x 1024, 32 heads of 128, causal", "4 x 4096, 32 heads of 128, causal", "1 x 16384, 32 heads of 128, causal",
		"4 x 4096, 32 heads of 128, not causal", "1 x 16384, 32 heads of 128, not causal",
		"1 x 512 behind 32768, 32/8 heads of 128, causal", "8 x 128 behind 8192, 32/8 heads of 128, causal",
		"512 and 63 x 1 of 4096, 32/8 heads of 128, causal", "512 and 63 x 1 of 4096, 32 heads of 128, causal", "512 and 63 x 1 of 4096, 32 heads of 64, causal",
	}
	if !slices.Equal(names, want) {
		t.Errorf("cases %q", names)
	}
	// Half of a square where a mask is causal; one token behind n others has n+1 keys, less a half by that count.
	c := prefillCase{shape: EvenShape(1, 2, 1, 100, 64), queries: []int{100}}
	if got := c.flops(); got != 4*100*100*2*64 {
		t.Errorf("%g", got)
	}
	c.causal = true
	if got := c.flops(); got != 4*100*100*64 {
		t.Errorf("causal: %g", got)
	}
}

// steady is a contender whose launches take a fixed time.
func steady(name string, log *[]string, seconds float64) *Contender {
	return &Contender{Name: name, close: func() error { return nil }, Replay: func(n int) ([]float64, error) {
		if log != nil {
			*log = append(*log, fmt.Sprint(name, n))
		}
		return slices.Repeat([]float64{seconds}, n), nil
	}}
}

func TestGPUAlternate(t *testing.T) {
	var log []string
	all, err := Alternate(2, 20, []*Contender{steady("a", &log, 100e-6), steady("b", &log, 1), steady("c", &log, 1e-6)})
	if got, want := strings.Join(log, " "), "a1 b1 c1 a3 b1 c32 a3 b1 c32"; err != nil || got != want {
		t.Errorf("turns %s (%v), want %s", got, err, want)
	}
	if len(all[0].Replays) != 6 || len(all[0].Rounds) != 2 || !measuretest.Near(all[0].Rounds[1], 100e-6) {
		t.Errorf("times %+v", all[0])
	}
	broken := &Contender{Name: "d", Replay: func(int) ([]float64, error) { return nil, errors.New("out of order") }}
	if _, err := Alternate(1, 20, []*Contender{broken}); err == nil || err.Error() != "d: out of order" {
		t.Errorf("error %v", err)
	}
}

// TestGPUJudge: times become the figures that they should, with bars.
func TestGPUJudge(t *testing.T) {
	judge := func(c gpuCase, contenders ...*Contender) *Bench {
		b := &Bench{Report: &measure.Report{}}
		times, err := Alternate(3, 20, contenders)
		if err != nil {
			t.Fatal(err)
		}
		b.judge(c, contenders, times, 2)
		return b
	}
	check := func(b *Bench, is, who string, m measure.Metric, want float64, barred, met bool) {
		t.Helper()
		f := b.Report.Find(is, who, m)
		if f == nil || !measuretest.Near(f.Value, want) || (f.Bar != nil) != barred || barred && f.Bar.Met != met {
			t.Errorf("%s of %s: %+v, want %v, bar %t, met %t", m, who, f, want, barred, met)
		}
	}
	c := namedCases()[1]
	c.micros = measure.AtMost(100)
	is := c.shape.String()
	flash, cudnn, info, plan := peerNames["flash"], peerNames["cudnn"], peerNames["flashinfer"], peerNames["flashinfer-plan"]
	b := judge(c,
		steady("ceiling A", nil, 100e-6), steady("ceiling B", nil, 98e-6), steady(ours, nil, 99e-6), steady(pageName(16), nil, 110e-6),
		steady(readerName(16), nil, 104e-6), steady(pageName(64), nil, 100e-6), steady(readerName(64), nil, 97e-6), steady(flash, nil, 300e-6), steady(cudnn, nil, 90e-6), steady(info, nil, 200e-6), steady(plan, nil, 50e-6))
	if f := b.Report.Find(is, "ceiling A", measure.Micros); f != nil {
		t.Errorf("the lower ceiling has %+v", f)
	}
	check(b, is, "ceiling B", measure.Micros, 98, false, false)
	check(b, is, ours, measure.Micros, 99, true, true)
	check(b, is, ours, measure.Speed, float64(c.shape.Bytes())/99e-6/1e9, false, false)
	check(b, is, ours, measure.GPUShare, 98./99, true, true)
	check(b, is, ours, measure.OverFlash, 300./99, true, true)
	check(b, is, ours, measure.OverBest, 90./99, true, false) // the one that plans does not count
	check(b, is, pageName(16), measure.OfDense, 99./110, true, false)
	check(b, is, pageName(16), measure.OfReader, 104./110, false, false)
	check(b, is, pageName(64), measure.OfReader, 97./100, false, false)
	check(b, is, readerName(16), measure.GPUShare, 98./104, false, false)
	check(b, is, readerName(16), measure.Speed, float64(c.shape.Bytes())/104e-6/1e9, false, false)
	for _, m := range []measure.Metric{measure.OfDense, measure.OfReader} {
		if f := b.Report.Find(is, readerName(16), m); f != nil {
			t.Errorf("the reader has %+v", f)
		}
	}
	check(b, is, flash, measure.Micros90, 300, false, false)
	if len(b.overBest) != 1 {
		t.Errorf("%v for the mean", b.overBest)
	}

	c = raggedCases()[0]
	is = c.shape.String()
	b = judge(c, steady("ceiling A", nil, 100e-6), steady("ceiling B", nil, 100e-6), steady(pageName(16), nil, 110e-6),
		steady(pageName(64), nil, 111e-6), steady(info, nil, 200e-6))
	check(b, is, pageName(16), measure.OfAllowed, 1, true, true)
	check(b, is, pageName(64), measure.OfAllowed, 111./110, true, false)
	check(b, is, pageName(64), measure.OverBest, 200./111, true, false)

	c = raggedCases()[1]
	is = c.shape.String()
	b = judge(c, steady("ceiling A", nil, 100e-6), steady("ceiling B", nil, 100e-6), steady(pageName(16), nil, 110e-6),
		steady(info, nil, 100e-6), steady(peerNames["flashinfer-batch"], nil, 133e-6))
	check(b, is, pageName(16), measure.OverBest, 100./110, true, false)
	check(b, is, pageName(16), measure.OverBatch, 133./110, true, true)

	c = groupCases()[0]
	is = c.shape.String()
	b = judge(c, steady("ceiling A", nil, 100e-6), steady("ceiling B", nil, 100e-6), steady(ours, nil, 100e-6),
		steady(groupName(2), nil, 102e-6), steady(groupName(16), nil, 104e-6))
	check(b, is, groupName(2), measure.TimeOfMHA, 1.02, true, true)
	check(b, is, groupName(16), measure.TimeOfMHA, 1.04, true, false)

	if m := geometricMean([]float64{1, 4, 2}); !measuretest.Near(m, 2) {
		t.Errorf("mean %v", m)
	}
	if q := quantile([]float64{5, 1, 4, 2, 3, 6, 7, 8, 10, 9}, 0.9); q != 10 {
		t.Errorf("p90 is %v", q)
	}
	if q := quantile([]float64{5, 1, 4, 2, 3, 6, 7, 8, 10, 9}, 0.1); q != 2 {
		t.Errorf("p10 is %v", q)
	}
}

// TestGPUPeers: the worker's ways become contenders, and what is missing is said
// once.
func TestGPUPeers(t *testing.T) {
	fake := func(how string) *Bench {
		defer func(f func(string, ...string) (*measure.Worker, error)) { startGPUWorker = f }(startGPUWorker)
		startGPUWorker = func(string, ...string) (*measure.Worker, error) { return measure.Start(measuretest.Command(t, how)) }
		b := &Bench{Report: &measure.Report{}, Options: Options{Peers: true}}
		if err := b.startPeers(); err != nil {
			t.Fatal(err)
		}
		return b
	}
	b := fake("gpu")
	if err := b.peers.arena(1 << 20); err != nil {
		t.Error(err)
	}
	for range 2 {
		all := b.peers.contenders(EvenShape(16, 32, 8, 1024, 128))
		if len(all) != 2 || all[0].Name != peerNames["flash"] || all[1].Name != peerNames["flashinfer"] {
			t.Fatalf("%d contenders", len(all))
		}
		if x, err := all[1].Replay(3); err != nil || len(x) != 3 || !measuretest.Near(x[2], 1e-3) {
			t.Errorf("times %v (%v)", x, err)
		}
	}
	if n := b.Report.Notes; len(n) != 2 || n[0] != "Fake 1.0" || n[1] != "b16, 32/8 heads x 1024 x 128, and perhaps others: without cudnn: too old" {
		t.Errorf("notes %q", n)
	}
	if n := len(b.peers.contenders(raggedCases()[2].shape)); n != 2 {
		t.Errorf("%d contenders", n)
	}
	if err := b.peers.close(); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"arena 1048576", "shape 32 8 128 4 20 16x1024\n", "shape 32 8 128 1 20 65536,32768,21845,"} {
		if !strings.Contains(b.peers.worker.Stderr.Text(), want) {
			t.Errorf("the worker was not asked for %q:%s", want, b.peers.worker.Stderr.Text())
		}
	}

	for how, want := range map[string]string{"gpu-few": "2 times of 3", "gpu-none": "takes no time"} {
		b := fake(how)
		if _, err := b.peers.contenders(EvenShape(1, 1, 1, 1024, 64))[0].Replay(3); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", how, err, want)
		}
		if err := b.peers.close(); err != nil {
			t.Error(err)
		}
	}
	for how, want := range map[string]string{"gpu-strange": `a way "magic"`, "gpu-refuses": "out of memory"} {
		b := fake(how)
		for range 2 {
			if n := len(b.peers.contenders(EvenShape(1, 1, 1, 1024, 64))); n != 0 {
				t.Errorf("%s: %d contenders", how, n)
			}
		}
		if n := b.Report.Notes; len(n) != 2 || !strings.Contains(n[1], want) {
			t.Errorf("%s: notes %q, want %q", how, n, want)
		}
		if err := b.peers.close(); err != nil {
			t.Error(err)
		}
	}

	none := &Bench{Report: &measure.Report{}}
	if err := none.startPeers(); err != nil || none.peers != nil || len(none.Report.Notes) != 1 {
		t.Errorf("-peers=false: %v, notes %q", err, none.Report.Notes)
	}
	if n := len(none.peers.contenders(EvenShape(1, 1, 1, 1024, 64))); n != 0 {
		t.Errorf("%d contenders of no peers", n)
	}
	lost := &Bench{Report: &measure.Report{}, Options: Options{Peers: true, Python: "/no/such/python"}}
	if err := lost.startPeers(); err == nil || !strings.Contains(err.Error(), "/no/such/python") || !strings.Contains(err.Error(), "-peers=false") {
		t.Errorf("no python: %v", err)
	}
}

// TestGPUNoDriver: a machine without one gets a line that says so, and no file.
func TestGPUNoDriver(t *testing.T) {
	defer func(f func() (*cuda.Driver, error)) { LoadDriver = f }(LoadDriver)
	LoadDriver = func() (*cuda.Driver, error) { return cuda.LoadFrom(filepath.Join(t.TempDir(), "libcuda.so.1")) }
	file := filepath.Join(t.TempDir(), "gpu.json")
	for _, args := range [][]string{{"gpu", "-json", file}, {"gpu", "-layer"}, {"gpu", "-peers=false"}} {
		var stdout, stderr strings.Builder
		if status := command.Run(Commands, args, &stdout, &stderr); status != 1 || stdout.Len() > 0 || !strings.Contains(stderr.String(), "no CUDA driver") {
			t.Errorf("%q: status %d, %q, %q", args, status, stdout.String(), stderr.String())
		}
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("a report of nothing was written")
	}
}

func TestGPULayerFigures(t *testing.T) {
	b := &Bench{Report: &measure.Report{}}
	names := []string{"kernels", "floor A", ours + " A", "floor B", ours + " B", "Set"}
	var contenders []measure.Contender
	var all []measure.Samples
	for i, n := range names {
		contenders = append(contenders, measure.Contender{Name: n})
		all = append(all, measure.Samples{12e-6 * float64(i+1) * float64(i+1)})
	}
	b.judgeLayer("S", contenders, all)
	for _, c := range []struct {
		who  string
		m    measure.Metric
		want float64
	}{{"kernels", measure.LayerMicros, 1}, {"floor A", measure.BeyondKernels, 3}, {ours + " B", measure.BeyondKernels, 24}, {ours + " B", measure.BeyondFloor, 9}, {"Set", measure.LayerMicros, 36}} {
		if f := b.Report.Find("S", c.who, c.m); f == nil || !measuretest.Near(f.Value, c.want) {
			t.Errorf("%s of %s: %+v, want %v", c.m, c.who, f, c.want)
		}
	}
	if f := b.Report.Find("S", "floor A", measure.BeyondFloor); f != nil {
		t.Errorf("%+v", f)
	}
}

func TestMain(m *testing.M) { measuretest.Main(m) }
