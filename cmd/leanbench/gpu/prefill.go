package gpu

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

const (
	tablePrompts  = "Prompts"
	tableChunks   = "Chunks of prompts behind earlier tokens"
	tableMixed    = "A chunk of a prompt and single tokens in one step"
	tableAllCUDNN = "All causal prompts, geometric mean"

	// leastCUDNN is the bar of that mean.
	leastCUDNN = 0.88

	float32Name = ours + ", float32 queries and outputs"
	chunkName   = ours + ", the chunk alone"
	singlesName = ours + ", the single tokens alone"
)

// prefillCase is a step with sequences of many queries.
type prefillCase struct {
	table   string
	shape   Shape // of the keys
	queries []int // of each sequence; its last keys are theirs
	causal  bool
	best    *measure.Bar         // times as fast as the best peer
	cudnn   *measure.Bar         // as CUDNN_ATTENTION
	flash   *measure.Bar         // as FLASH_ATTENTION
	precise *measure.Bar         // of float32 queries and outputs: as CUDNN_ATTENTION of float16
	pages   map[int]*measure.Bar // share of the speed with contiguous keys
}

// prefillCases have bars for each.
func prefillCases() (cases []prefillCase) {
	pages := map[int]*measure.Bar{16: measure.AtLeast(0.90), 64: measure.AtLeast(0.95)}
	add := func(batch, heads, kvHeads, keys, dim, queries int) *prefillCase {
		cases = append(cases, prefillCase{
			table: tablePrompts, shape: EvenShape(batch, heads, kvHeads, keys, dim), queries: slices.Repeat([]int{queries}, batch), causal: true,
			pages: pages, precise: measure.AtLeast(0.40),
		})
		return &cases[len(cases)-1]
	}
	for _, dim := range []int{64, 128} {
		for batch := 16; batch > 0; batch /= 4 {
			c := add(batch, 32, 32, 16384/batch, dim, 16384/batch)
			c.cudnn, c.flash = measure.AtLeast(0.80), measure.AtLeast(1.3)
		}
	}
	for _, batch := range []int{4, 1} {
		c := add(batch, 32, 32, 16384/batch, 128, 16384/batch)
		c.causal, c.cudnn = false, measure.AtLeast(0.85)
	}
	for _, chunk := range []struct{ batch, behind, queries int }{{1, 32768, 512}, {8, 8192, 128}} {
		c := add(chunk.batch, 32, 8, chunk.behind+chunk.queries, 128, chunk.queries)
		c.table, c.best = tableChunks, measure.AtLeast(0.80)
	}
	for _, s := range []Shape{EvenShape(64, 32, 8, 4096, 128), EvenShape(64, 32, 32, 4096, 128), EvenShape(64, 32, 32, 4096, 64)} {
		mixed := add(64, s.heads, s.kvHeads, 4096, s.dim, 1)
		mixed.table, mixed.pages, mixed.precise = tableMixed, map[int]*measure.Bar{64: nil}, nil
		mixed.queries[0] = 512
	}
	return cases
}

func (c *prefillCase) String() string {
	mask := "causal"
	if !c.causal {
		mask = "not causal"
	}
	batch, keys, of := c.shape.batch(), c.shape.lengths[0], ""
	switch first := c.queries[0]; {
	case c.mixed():
		of = fmt.Sprintf("%d and %d x 1 of %d", first, batch-1, keys)
	case first < keys:
		of = fmt.Sprintf("%d x %d behind %d", batch, first, keys-first)
	default:
		of = fmt.Sprintf("%d x %d", batch, keys)
	}
	heads := fmt.Sprint(c.shape.heads)
	if c.shape.kvHeads != c.shape.heads {
		heads += fmt.Sprintf("/%d", c.shape.kvHeads)
	}
	return fmt.Sprintf("%s, %s heads of %d, %s", of, heads, c.shape.dim, mask)
}

// mixed says whether some sequences have a single token.
func (c *prefillCase) mixed() bool { return slices.Min(c.queries) == 1 && slices.Max(c.queries) > 1 }

// only is c without the sequences of fewer queries, or of more.
func (c *prefillCase) only(keep func(queries int) bool) *prefillCase {
	some := *c
	some.queries, some.shape.lengths = nil, nil
	for i, n := range c.queries {
		if keep(n) {
			some.queries, some.shape.lengths = append(some.queries, n), append(some.shape.lengths, c.shape.lengths[i])
		}
	}
	return &some
}

// flops is 4 x pairs of query and key x the head dim; where a mask is causal half of the pairs
// count of a sequence's own tokens.
func (c *prefillCase) flops() float64 {
	pairs := 0.0
	for i, n := range c.queries {
		q, k := float64(n), float64(c.shape.lengths[i])
		if c.causal {
			k -= q / 2
		}
		pairs += q * k
	}
	return 4 * pairs * float64(c.shape.heads*c.shape.dim)
}

// launches are those of a graph: some milliseconds.
func (c *prefillCase) launches() int {
	const speed, turn = 400e12, 2e-3
	return int(min(max(turn*speed/c.flops(), 1), 20))
}

func (c *prefillCase) layOut(pageTokens int, d *gpuDevice) gpuProblem {
	p := layOut(c.shape, pageTokens, d.rng)
	p.geometry.Causal = c.causal
	row := 0
	for i, n := range c.queries {
		p.seqs[i].Row, p.seqs[i].Queries = row, n
		row += n
	}
	return p
}

// prompts is ours of a case. Its output is compared before anything is timed.
func (d *gpuDevice) prompts(name string, c *prefillCase, pageTokens int, dtype attn.DType) (_ *Contender, err error) {
	p := c.layOut(pageTokens, d)
	rows := 0
	for _, n := range c.queries {
		rows += n
	}
	p.geometry.QueryType = dtype
	plan := d.engine.NewPlan()
	closers := []func() error{plan.Close}
	defer func() {
		if err == nil {
			return
		}
		err = fmt.Errorf("%s: %w", name, err)
		for _, f := range closers {
			err = errors.Join(err, f())
		}
	}()
	if err := plan.Build(p.geometry, p.seqs, rows); err != nil {
		return nil, err
	}
	if err := plan.Upload(d.stream); err != nil {
		return nil, err
	}
	n := rows * c.shape.heads * c.shape.dim
	memory := func() (gpu.Memory, error) {
		b, err := d.dev.NewBuffer(int64(n * dtype.Size()))
		if err == nil {
			closers = append(closers, b.Close)
		}
		return gpu.Memory{Buffer: b, DType: dtype, Len: n}, err
	}
	q, err := memory()
	if err != nil {
		return nil, err
	}
	out, err := memory()
	if err != nil {
		return nil, err
	}
	queries, err := d.fill(&q, 3)
	if err != nil {
		return nil, err
	}
	k := gpu.Memory{Buffer: d.keys, DType: attn.Float16, Len: int(p.elements)}
	v := k
	v.Offset += 2 * p.elements
	one, err := d.contender(name, c.launches(), func(int) error {
		return plan.Run(d.stream, &attention.Operands{Q: q, Out: out, Pages: attn.InPlanes(k, v)})
	}, closers...)
	if err != nil {
		return nil, err
	}
	closers = []func() error{one.close} // those of before are in it
	return one, d.verifyPrompts(one, c, &p, queries, &out)
}

// verifyPrompts is verify for one row of a sequence of each number of queries.
func (d *gpuDevice) verifyPrompts(c *Contender, of *prefillCase, p *gpuProblem, queries []float64, out *gpu.Memory) error {
	if d.unchecked {
		return nil
	}
	if err := out.Buffer.Set(0, 0xff, out.Buffer.Len()); err != nil {
		return err
	}
	if _, err := c.Replay(1); err != nil {
		return err
	}
	tolerance := 0.02
	if out.DType == attn.Float32 {
		tolerance = 1e-5
	}
	for _, seq := range []int{0, len(p.seqs) - 1, d.rng.IntN(len(p.seqs))} {
		head, pos := d.rng.IntN(p.heads), d.rng.IntN(p.seqs[seq].Queries)
		keys := p.seqs[seq].Keys
		if of.causal {
			keys -= p.seqs[seq].Queries - pos - 1
		}
		at := (p.seqs[seq].Row+pos)*p.geometry.Query.Row + head*p.geometry.Query.Head
		q := make([]float64, p.dim)
		for i := range q {
			q[i] = queries[(at+i)%len(queries)]
		}
		got, err := rowOf(out, at, p.dim)
		if err != nil {
			return err
		}
		if err := compareRow(got, d.reference(p, seq, head, keys, 0, q), tolerance); err != nil {
			return fmt.Errorf("query %d of sequence %d, head %d: %w", pos, seq, head, err)
		}
	}
	return nil
}

// rowOf is n elements of m from one on.
func rowOf(m *gpu.Memory, at, n int) ([]float64, error) {
	size := m.DType.Size()
	bytes, row := make([]byte, n*size), make([]float64, n)
	if err := m.Buffer.Download(bytes, int64(at*size)); err != nil {
		return nil, err
	}
	for i := range row {
		if m.DType == attn.Float16 {
			row[i] = float64((*(*half.Float16)(unsafe.Pointer(&bytes[2*i]))).Float32())
		} else {
			row[i] = float64(*(*float32)(unsafe.Pointer(&bytes[4*i])))
		}
	}
	return row, nil
}

// prompts measures steps with many queries.
func (b *Bench) prompts() error {
	cases := prefillCases()
	if b.prefill != nil {
		cases = b.prefill
	}
	if m := b.Options.match; m != nil {
		cases = slices.DeleteFunc(cases, func(c prefillCase) bool { return !m.MatchString(c.String()) })
	}
	if len(cases) == 0 {
		return errors.New("there is no such shape (-match)")
	}
	size := clockShape.rotation()
	for _, c := range cases {
		size = max(size, c.shape.Region())
	}
	memory, err := b.Device.dev.Memory()
	if err != nil {
		return err
	}
	if size > memory.Free/2 {
		return fmt.Errorf("%w: keys and values take %d MB, and there are %d", cuda.ErrOutOfMemory, size>>20, memory.Free>>20)
	}
	if err := b.Device.Fill(size, ArenaPeriod); err != nil {
		return err
	}
	b.Note("operands of float16 where nothing else is said; TFLOP/s are 4 x queries x keys x head dim, half of it where causal")
	b.Clock("before")
	b.Report.WriteHead(b.Stdout)
	said := len(b.Report.Notes)
	var failed []error
	for i, c := range cases {
		fmt.Fprintf(b.Stderr, "%d of %d: %s\n", i+1, len(cases), &c)
		if err := b.measurePrompts(&c); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", &c, err))
			fmt.Fprintln(b.Stderr, failed[len(failed)-1])
		}
		if err := b.save(); err != nil {
			return err
		}
		if i+1 == len(cases) || cases[i+1].table != c.table {
			b.Report.WriteTable(b.Stdout, c.table)
		}
	}
	if len(b.overCUDNN) > 0 {
		b.Report.Row(tableAllCUDNN, "", ours).Add(measure.OverCUDNN, geometricMean(b.overCUDNN), measure.AtLeast(leastCUDNN))
		b.Report.WriteTable(b.Stdout, tableAllCUDNN)
	}
	b.Clock("after")
	if notes := b.Report.Notes[said:]; len(notes) > 0 {
		fmt.Fprintf(b.Stdout, "\n- %s\n", strings.Join(notes, "\n- "))
	}
	b.Report.WriteVerdict(b.Stdout)
	return errors.Join(failed...)
}

// prefillRounds are how often contenders take turns.
const prefillRounds = 7

func (b *Bench) measurePrompts(c *prefillCase) (err error) {
	var all []*Contender
	defer func() { err = errors.Join(err, CloseAll(all)) }()
	add := func(name string, c *prefillCase, pageTokens int, dtype attn.DType) {
		if err == nil {
			var one *Contender
			if one, err = b.Device.prompts(name, c, pageTokens, dtype); one != nil {
				all = append(all, one)
			}
		}
	}
	add(ours, c, 0, attn.Float16)
	add(float32Name, c, 0, attn.Float32)
	for _, n := range []int{16, 64} {
		if _, wanted := c.pages[n]; wanted {
			add(pageName(n), c, n, attn.Float16)
		}
	}
	if c.mixed() {
		add(chunkName, c.only(func(n int) bool { return n > 1 }), 0, attn.Float16)
		add(singlesName, c.only(func(n int) bool { return n == 1 }), 0, attn.Float16)
	}
	if err != nil {
		return err
	}
	if !c.mixed() {
		all = append(all, b.peers.prompts(c)...)
	}
	// Turns of graphs with other numbers of launches are as long all the same.
	times, err := Alternate(prefillRounds, c.launches(), all)
	if err != nil {
		return err
	}
	b.judgePrompts(c, all, times)
	return nil
}

// judgePrompts takes the figures of a case down.
func (b *Bench) judgePrompts(c *prefillCase, all []*Contender, times []Times) {
	find := func(name string) *Times {
		if i := slices.IndexFunc(all, func(x *Contender) bool { return x.Name == name }); i >= 0 {
			return &times[i]
		}
		return nil
	}
	dense, flash, cudnn, chunk, singles := find(ours), find(peerNames["flash"]), find(peerNames["cudnn"]), find(chunkName), find(singlesName)
	var best *Times
	for i, x := range all {
		if t := &times[i]; isPeer(x.Name) && (best == nil || t.Rounds.Median() < best.Rounds.Median()) {
			best = t
		}
	}
	for i, x := range all {
		t := &times[i]
		r := b.Report.Row(c.table, c.String(), x.Name)
		isDense := t == dense
		r.Add(measure.Micros, 1e6*quantile(t.Replays, 0.5), nil)
		if t != chunk && t != singles {
			r.Add(measure.TFLOPs, c.flops()/t.Rounds.Median()/1e12, nil)
		}
		if cudnn != nil && t != cudnn {
			bar := measure.Only(isDense, c.cudnn)
			if x.Name == float32Name {
				bar = c.precise
			}
			over := t.Rounds.Faster(cudnn.Rounds)
			r.Add(measure.OverCUDNN, over, bar)
			if isDense && c.causal && c.table == tablePrompts {
				b.overCUDNN = append(b.overCUDNN, over)
			}
		}
		if isDense && flash != nil {
			r.Add(measure.OverFlash, t.Rounds.Faster(flash.Rounds), c.flash)
		}
		if isDense && best != nil {
			r.Add(measure.OverBest, t.Rounds.Faster(best.Rounds), c.best)
		}
		for n, bar := range c.pages {
			if x.Name == pageName(n) {
				r.Add(measure.OfDense, t.Rounds.Faster(dense.Rounds), bar)
			}
		}
		if isDense && chunk != nil && singles != nil {
			x, y := chunk.Rounds.Median(), singles.Rounds.Median()
			r.Add(measure.OfSum, t.Rounds.Median()/(1.05*max(x, y)+0.2*min(x, y)), measure.AtMost(1))
		}
	}
}
