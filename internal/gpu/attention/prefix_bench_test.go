package attention

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// forkTree describes sequences that share prefixes: the levels of a tree. Each node of the level above has `children`
// children, with `keys` own keys each. The last level is the sequences.
type forkTree []struct{ children, keys int }

// sequences returns the sequences, with one more token each, and the number of pages.
func (f forkTree) sequences(page int) (seqs []attn.Sequence, pages int) {
	var walk func(level int, before []int32)
	walk = func(level int, before []int32) {
		if level == len(f) {
			seqs = append(seqs, attn.Sequence{Row: len(seqs), Queries: 1, Keys: len(before) * page, Pages: before})
			return
		}
		for range f[level].children {
			own := slices.Clone(before)
			for range f[level].keys / page {
				own = append(own, int32(pages))
				pages++
			}
			walk(level+1, own)
		}
	}
	walk(0, nil)
	return seqs, pages
}

// BenchmarkGPUPrefixes measures a step of sequences that share prefixes, with and without sharing, alternating: us, and
// the bandwidth of distinct keys and values. With parts it also measures each launch alone, and other numbers of thread
// blocks. It measures once for any -benchtime.
func BenchmarkGPUPrefixes(b *testing.B) {
	m := realGPU(b)
	for _, c := range []struct {
		name  string
		of    forkTree
		query attn.DType
		mods  func(*attn.Problem) // if set, no other numbers of thread blocks
	}{
		{"16x(32768+1024)", forkTree{{1, 32768}, {16, 1024}}, attn.Float16, nil},
		{"64x(8192+512)", forkTree{{1, 8192}, {64, 512}}, attn.Float16, nil},
		{"256x(2048+128)", forkTree{{1, 2048}, {256, 128}}, attn.Float16, nil},
		{"4096,8x8192,8x256", forkTree{{1, 4096}, {8, 8192}, {8, 256}}, attn.Float16, nil},
		{"64x(8192+512)_f32", forkTree{{1, 8192}, {64, 512}}, attn.Float32, nil},
		{"4x(8192+512)", forkTree{{1, 8192}, {4, 512}}, attn.Float16, nil},
		{"8x(1024+512)", forkTree{{1, 1024}, {8, 512}}, attn.Float16, nil},
		{"16x(1024+512)", forkTree{{1, 1024}, {16, 512}}, attn.Float16, nil},
		{"8x(512+512)", forkTree{{1, 512}, {8, 512}}, attn.Float16, nil},
		{"64x(8192+512)_window", forkTree{{1, 8192}, {64, 512}}, attn.Float16, func(g *attn.Problem) { g.Window = 8704 }},
		{"16x(8192+128)_window_4096", forkTree{{1, 8192}, {16, 128}}, attn.Float16, func(g *attn.Problem) { g.Window = 4096 }},
		{"64x(8192+512)_window_4096", forkTree{{1, 8192}, {64, 512}}, attn.Float16, func(g *attn.Problem) { g.Window = 4096 }},
		{"64x(8192+512)_slopes", forkTree{{1, 8192}, {64, 512}}, attn.Float16, func(g *attn.Problem) { g.Slopes = attn.NewSlopes(make([]float64, g.Heads)) }},
		{"256x(2048+128)_slopes", forkTree{{1, 2048}, {256, 128}}, attn.Float16, func(g *attn.Problem) { g.Slopes = attn.NewSlopes(make([]float64, g.Heads)) }},
	} {
		b.Run(c.name, func(b *testing.B) { m.benchmarkPrefixes(b, c.of, c.query, c.mods) })
	}
}

func (m *machine) benchmarkPrefixes(b *testing.B, of forkTree, query attn.DType, mods func(*attn.Problem)) {
	const heads, kv, dim, page = 32, 8, 128, 16
	seqs, pages := of.sequences(page)
	rows := len(seqs)
	g := attn.Problem{Heads: heads, KVHeads: kv, Dim: dim, ValueDim: dim, Pages: attn.Separate(attn.Float16, dim, dim, attn.PageStrides{Page: kv * page * dim, Head: page * dim, Row: dim}, attn.PageStrides{}), PageTokens: page, Scale: 0.1, Mask: attn.Mask{Causal: true}, QueryType: query,
		Query: attn.Strides{Row: heads * dim, Head: dim}, Out: attn.Strides{Row: heads * dim, Head: dim},
	}
	g.Pages.Planes[1].At = g.Pages.Planes[0].At
	if mods != nil {
		mods(&g)
	}
	rng := reftest.Rand(b)
	memory := func(n int, t attn.DType) gpu.Memory {
		x := make([]byte, 1<<20*t.Size())
		for i := range 1 << 20 {
			enginetest.Put(x, i, t, rng.NormFloat64())
		}
		buffer, err := m.Dev.NewBuffer(int64(n * t.Size()))
		noError(b, err)
		b.Cleanup(func() { noError(b, buffer.Close()) })
		for at := 0; at < n*t.Size(); at += len(x) {
			noError(b, buffer.Upload(int64(at), x[:min(len(x), n*t.Size()-at)]))
		}
		return gpu.Memory{Buffer: buffer, DType: t, Len: n}
	}
	n := rows * heads * dim
	o := &Operands{Q: memory(n, query), Out: memory(n, query), Pages: attn.InPlanes(memory(pages*g.Pages.Planes[0].At.Page, attn.Float16), memory(pages*g.Pages.Planes[0].At.Page, attn.Float16))}
	seen := map[int32]bool{} // pages with a visible key
	for i := range seqs {
		first, end := g.Mask.Keys(1, seqs[i].Keys, 0)
		for _, page := range seqs[i].Pages[first/g.PageTokens : attn.Ceil(end, g.PageTokens)] {
			seen[page] = true
		}
	}
	bytes := float64(2 * len(seen) * g.Pages.Planes[0].At.Page * 2)

	const launches, rounds = 5, 12
	type contender struct {
		name  string
		graph *cuda.Graph
		us    []float64
	}
	var all []*contender
	add := func(name string, g attn.Problem, change func(*Plan), run func(*Plan) error) {
		plan := m.engine.NewPlan()
		b.Cleanup(func() { noError(b, plan.Close()) })
		noError(b, plan.Reserve(Capacity{Sequences: rows, Rows: rows, Pages: pages}))
		noError(b, plan.Build(g, seqs, rows))
		if name == "shared" {
			begin := time.Now()
			for range 100 {
				noError(b, plan.Build(g, seqs, rows))
			}
			name = fmt.Sprintf("shared: %v, %d blocks beside, plan %.1f us", plan.form.sharing.on(), plan.prefixes.blocks, float64(time.Since(begin).Microseconds())/100)
		}
		if change != nil {
			change(plan)
		}
		noError(b, plan.Upload(m.Stream))
		if run == nil {
			run = func(p *Plan) error { return p.Run(m.Stream, o) }
		}
		graph, err := m.Stream.Capture(func() error {
			for range launches {
				if err := run(plan); err != nil {
					return err
				}
			}
			return nil
		})
		noError(b, err)
		b.Cleanup(func() { noError(b, graph.Close()) })
		all = append(all, &contender{name: name, graph: graph})
	}
	alone := g
	alone.TileTokens = defaultTile // a requested tile size prevents sharing
	add("alone", alone, nil, nil)
	add("shared", g, nil, nil)
	m.engine.Eager = true
	beside := func(n int) func(*Plan) {
		return func(p *Plan) {
			x, own, of := &p.prefixes, ownProblem(&g), prefixProblem(&g, true)
			p.findPrefixes(&g, seqs, rows)
			if x.blocks = n; x.direct {
				blocks := n
				if n == 0 {
					blocks = m.engine.blocks
				}
				p.alikePrefixes(&of, p.manyOfPrefixes(&of))
				p.cutPrefixes(&of, p.piecesOf(&of, p.manyOfPrefixes(&of), blocks, p.form.sharing.gathered).size)
			}
			row := 0
			for i := range x.seqs {
				x.seqs[i].Row = row
				row += x.seqs[i].Queries
			}
			noError(b, p.buildPrefixes(&own, &p.form.sharing))
			p.listPrefixes(seqs, &p.form.sharing)
			p.schedule(&own, p.seqs.data, m.engine.blocks-n, true, BlockRows)
			p.prefetchPages(&own, p.form.walks)
		}
	}
	counts := []int{0, 24, 32, 40, 48, 56, 64, 76, 88}
	if mods != nil {
		counts = counts[:0]
	}
	for _, n := range counts {
		add(fmt.Sprintf("%d blocks beside", n), g, beside(n), nil)
	}
	parts := func(which int) func(*Plan) error {
		return func(p *Plan) error {
			x := &p.prefixes
			if err := p.Run(m.Stream, o); err != nil { // sets the parameters of launches
				return err
			}
			return [...]func() error{
				func() error {
					return launchAround(p, m.Stream, o, m.engine.gatherPrefixes, min(p.form.sharing.gathered, 8*m.engine.blocks), &x.gather)
				},
				func() error { return p.launch(m.Stream, o, p.kernelOf(o, false)) },
				func() error {
					return launchAround(p, m.Stream, o, m.engine.mergePrefixes, min(rows*heads/8, 8*m.engine.blocks), &x.merge)
				},
			}[which]()
		}
	}
	for i, name := range []string{"shared and a gather", "shared and own keys", "shared and a merge"} {
		if mods != nil {
			break
		}
		add(name, g, beside(0), parts(i))
	}
	m.engine.Eager = false

	var marks [2]*cuda.Event
	for i := range marks {
		var err error
		marks[i], err = m.Dev.NewEvent(true)
		noError(b, err)
		defer marks[i].Close()
	}
	for b.Loop() { // once
	}
	for round := range rounds + 1 { // the first round is a warm-up
		for _, x := range all {
			noError(b, m.Stream.Record(marks[0]))
			noError(b, m.Stream.Launch(x.graph))
			noError(b, m.Stream.Record(marks[1]))
			noError(b, m.Stream.Synchronize())
			took, err := marks[1].Since(marks[0])
			noError(b, err)
			if round > 0 {
				x.us = append(x.us, float64(took.Nanoseconds())/1e3/launches)
			}
		}
	}
	for _, x := range all {
		slices.Sort(x.us)
		us := x.us[len(x.us)/2]
		fmt.Printf("%s %s: %.1f us, %.0f GB/s of %.0f MB\n", b.Name(), x.name, us, bytes/us/1e3, bytes/1e6)
	}
	b.ReportMetric(0, "ns/op")
}
