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

// BenchmarkGPUMixed measures a step of a chunk and single tokens by each method, and each kind of sequence alone,
// alternating. The fastest method is what divide should choose. It measures once for any -benchtime.
func BenchmarkGPUMixed(b *testing.B) {
	m := realGPU(b)
	if !m.runsBeside() {
		b.Skip("no kernels here run beside each other")
	}
	for _, c := range []mixedStep{
		{512, 4096, 63, 4096, 32, 8, 128}, {512, 4096, 63, 4096, 32, 32, 128}, {512, 4096, 63, 4096, 32, 32, 64},
		{512, 512, 31, 1024, 32, 8, 128}, {128, 1024, 15, 1024, 32, 32, 64}, {2048, 2048, 32, 2048, 32, 8, 128},
	} {
		for _, query := range []attn.DType{attn.Float16, attn.Float32} {
			b.Run(fmt.Sprintf("%d_of_%d_and_%dx1_of_%d_h%d/%d_d%d_%v", c.queries, c.keys, c.singles, c.behind, c.heads, c.kv, c.dim, query), func(b *testing.B) {
				m.benchmarkMixed(b, c, query)
			})
		}
	}
}

// mixedStep is a chunk and single tokens.
type mixedStep struct{ queries, keys, singles, behind, heads, kv, dim int }

func (m *machine) benchmarkMixed(b *testing.B, c mixedStep, query attn.DType) {
	page := max(c.keys, c.behind)
	g := attn.Problem{Heads: c.heads, KVHeads: c.kv, Dim: c.dim, ValueDim: c.dim, Pages: attn.Separate(attn.Float16, c.dim, c.dim, attn.PageStrides{Page: c.kv * page * c.dim, Head: page * c.dim, Row: c.dim}, attn.PageStrides{}), PageTokens: page, Scale: 0.1, Mask: attn.Mask{Causal: true}, QueryType: query,
		Query: attn.Strides{Row: c.heads * c.dim, Head: c.dim}, Out: attn.Strides{Row: c.heads * c.dim, Head: c.dim},
	}
	g.Pages.Planes[1].At = g.Pages.Planes[0].At
	seqs := []attn.Sequence{{Queries: c.queries, Keys: c.keys, Pages: []int32{0}}}
	for i := range c.singles {
		seqs = append(seqs, attn.Sequence{Row: c.queries + i, Queries: 1, Keys: c.behind, Pages: []int32{int32(i + 1)}})
	}
	rows := c.queries + c.singles
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
	n := rows * c.heads * c.dim
	o := &Operands{Q: memory(n, query), Out: memory(n, query), Pages: attn.InPlanes(memory(len(seqs)*g.Pages.Planes[0].At.Page, attn.Float16), memory(len(seqs)*g.Pages.Planes[0].At.Page, attn.Float16))}
	other, err := m.Dev.NewStream()
	noError(b, err)
	defer other.Close()
	var forks [2]*cuda.Event
	for i := range forks {
		forks[i], err = m.Dev.NewEvent(false)
		noError(b, err)
		defer forks[i].Close()
	}

	const launches, rounds = 5, 12
	type contender struct {
		name  string
		graph *cuda.Graph
		us    []float64
	}
	var all []*contender
	add := func(name string, take choice, seqs []attn.Sequence, change func(*Plan), run func(*Plan) error) {
		m.engine.choice = take
		defer func() { m.engine.choice = takeFastest }()
		plan := m.engine.NewPlan()
		b.Cleanup(func() { noError(b, plan.Close()) })
		noError(b, plan.Build(g, seqs, 0))
		if change != nil {
			change(plan)
		}
		noError(b, plan.Upload(m.Stream))
		if name == "chosen" {
			works := 0 // decode blocks
			for i := range plan.works.data {
				if plan.works.data[i].tiles > 0 {
					works++
				}
			}
			name = fmt.Sprintf("chosen: %v, %d decode blocks", plan.Kernels(), works)
		}
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
	blocks := m.engine.blocks
	// `many` blocks for the prefill kernel, `others` for the decode kernel.
	share := func(many, others int) func(*Plan) {
		return func(p *Plan) {
			k, few := p.form.prefill.taken(&g, false), c.singles
			bytes := m.engine.partBytes(k)
			noError(b, p.memory.reserve(m.engine, nil, workspaceSize{tileRows: BlockRows, dim: c.dim, parts: bytes}))
			d := division{prefillKernels: p.form.prefill, few: few, queries: 1, blocks: many}
			p.dealOut(&g, k, &d)
			p.schedule(&g, p.seqs.data[:few], others, false, BlockRows)
			p.listPrefill(&g, d)
		}
	}
	// On another stream.
	forked := func(p *Plan) error {
		k := p.kernelOf(o, false)
		noError(b, m.Stream.Record(forks[0]))
		noError(b, other.Wait(forks[0]))
		p.form.both = false // it waits for earlier launches
		defer func() { p.form.both = true }()
		if err := k.family.run(p, other, o, k); err != nil {
			return err
		}
		if err := p.form.kernel.family.run(p, m.Stream, o, p.form.kernel); err != nil {
			return err
		}
		noError(b, other.Record(forks[1]))
		return m.Stream.Wait(forks[1])
	}
	behind := func(p *Plan) error { // one after the other, each on all multiprocessors
		p.form.both = false
		defer func() { p.form.both = true }()
		if err := p.form.kernel.family.run(p, m.Stream, o, p.form.kernel); err != nil {
			return err
		}
		k := p.kernelOf(o, false)
		return k.family.run(p, m.Stream, o, k)
	}
	add("chunk", takeFastest, seqs[:1], nil, nil)
	add("singles", takeFastest, seqs[1:], nil, nil)
	add("chosen", takeFastest, seqs, nil, nil)
	add("few", takeFastest, seqs, func(p *Plan) {
		p.form.prefill, p.form.both, p.form.tileRows = prefillKernels{}, false, BlockRows
		w := want{problem: &g, features: g.Features(), rows: BlockRows}
		p.form.kernel = m.engine.find(&w)
		noError(b, m.engine.load(p.form.kernel))
		p.schedule(&g, p.seqs.data, blocks, false, BlockRows)
	}, nil)
	add("many", takePrefill, seqs, nil, nil)
	add("behind", takeBoth, seqs, share(blocks, blocks), behind)
	for _, n := range []int{8, 12, 16, 20, 22, 24, 26, 28, 32, 36, 44, 56} {
		add(fmt.Sprintf("both %d", n), takeBoth, seqs, share(n, blocks-n), nil)
	}
	for _, n := range []int{16, 22, 26, 32, 44} {
		add(fmt.Sprintf("stream %d", n), takeBoth, seqs, share(n, blocks-n), forked)
	}
	for _, n := range []int{124, 116, 110, 104, 96, 88} {
		add(fmt.Sprintf("singles by %d", n), takeFastest, seqs[1:], func(p *Plan) { p.schedule(&g, p.seqs.data, n, false, BlockRows) }, nil)
	}
	for _, n := range []int{56, 26} {
		add(fmt.Sprintf("chunk by %d", n), takePrefill, seqs[:1], func(p *Plan) {
			k := p.form.prefill.taken(&g, false)
			bytes := m.engine.partBytes(k)
			noError(b, p.memory.reserve(m.engine, nil, workspaceSize{tileRows: BlockRows, dim: c.dim, parts: bytes}))
			d := division{prefillKernels: p.form.prefill, blocks: n}
			p.dealOut(&g, k, &d)
			p.listPrefill(&g, d)
		}, nil)
	}

	var marks [2]*cuda.Event
	for i := range marks {
		marks[i], err = m.Dev.NewEvent(true)
		noError(b, err)
		defer marks[i].Close()
	}
	for b.Loop() {
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
				x.us = append(x.us, float64(took)/float64(time.Microsecond)/launches)
			}
		}
	}
	for _, x := range all {
		slices.Sort(x.us)
	}
	median := func(i int) float64 { return all[i].us[rounds/2] }
	allowed := 1.05*max(median(0), median(1)) + 0.2*min(median(0), median(1))
	text := fmt.Sprintf("allowed %.1f us", allowed)
	for i, x := range all {
		text += fmt.Sprintf("\n%-16s %8.1f us, least %8.1f, %6.1f%%", x.name, median(i), x.us[0], 100*median(i)/allowed)
	}
	b.Log(text)
	b.ReportMetric(median(2), "us/launch")
	b.ReportMetric(100*median(2)/allowed, "%allowed")
}
