package gpu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const (
	tableMLA    = "Attention of a decode step to latent vectors in bfloat16, with the values' weights and the exchange, over processes of as many threads each"
	tableErrors = "Errors of TPLA on a random low-rank model: the root mean square of the differences over that of exact attention"
)

// mlaShape is the shape of a decode step of latent attention.
type mlaShape struct{ batch, keys, heads, latent, rope, value int }

func (s mlaShape) String() string {
	return fmt.Sprintf("%d x %d keys, %d heads, %d + %d elements", s.batch, s.keys, s.heads, s.latent, s.rope)
}

// mlaShapes are the shapes that are measured: DeepSeek's heads and latent vectors.
func mlaShapes(quick bool) []mlaShape {
	all := []mlaShape{{1, 4096, 128, 512, 64, 128}, {1, 32768, 128, 512, 64, 128}, {4, 8192, 128, 512, 64, 128}, {4, 8192, 16, 512, 64, 128}}
	if quick {
		return all[:1]
	}
	return all
}

// startMLARank starts the process of a rank: this program again. Tests replace startMLARank.
var startMLARank = func(w ranks.World, threads int, flags []string, stderr io.Writer) (wait func() error, err error) {
	name, err := os.Executable()
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(w.Address)
	if err != nil {
		return nil, err
	}
	c := exec.Command(name, append([]string{"scale", "-mla"}, flags...)...)
	c.Env = append(os.Environ(), "RANK="+strconv.Itoa(w.Rank), "WORLD_SIZE="+strconv.Itoa(w.Size), "LOCAL_RANK="+strconv.Itoa(w.Rank), "MASTER_ADDR="+host,
		"LEANATTENTION_MASTER_PORT="+port, "LEANATTENTION_RANKS_TIMEOUT=2m", "GOMAXPROCS="+strconv.Itoa(threads))
	c.Stderr = stderr
	if err := c.Start(); err != nil {
		return nil, err
	}
	return c.Wait, nil
}

// measureMLA measures latent attention on several processes of this machine against one of them: the context over the processes, and TPLA.
// This process is rank 0. A process that was started as another rank computes alone.
func (s *scaling) measureMLA(sizes []Ranks, shapes []mlaShape) (err error) {
	switch {
	case s.python != "" || slices.ContainsFunc(sizes, func(r Ranks) bool { return r.GPUs > 1 }):
		return errors.New("-mla has neither PyTorch nor processes with GPUs: leave out -python and GPUs of -ranks")
	case s.counts != nil && sizes != nil:
		return errors.New("-mla computes on GPUs of one process or on CPUs of several: leave out -gpus or -ranks")
	case s.counts != nil:
		return s.measureMLAGPUs(mlaLayers(s.quick))
	}
	shapes = slices.DeleteFunc(slices.Clone(shapes), func(c mlaShape) bool { return !s.asked(c.String()) })
	if world, err := ranks.Environment(); err != nil {
		return err
	} else if world.Size > 1 {
		return s.joinMLA(world, shapes)
	}
	if len(sizes) == 0 {
		sizes = []Ranks{{2, 1}}
	}
	s.report.WriteHead(s.stdout)
	for _, r := range sizes {
		threads := max(1, s.report.Machine.Workers/r.Size)
		before := runtime.GOMAXPROCS(threads)
		err := s.startMLA(r.Size, threads, shapes)
		runtime.GOMAXPROCS(before)
		if err != nil {
			return fmt.Errorf("%d ranks: %w", r.Size, err)
		}
	}
	s.report.WriteTable(s.stdout, tableMLA)
	if err := s.mlaErrors(); err != nil {
		return err
	}
	s.report.WriteTable(s.stdout, tableErrors)
	return s.save()
}

// startMLA starts the other ranks, and measures as rank 0.
func (s *scaling) startMLA(size, threads int, shapes []mlaShape) (err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	world := ranks.World{Size: size, Address: l.Addr().String(), Timeout: 2 * time.Minute}
	if err := l.Close(); err != nil {
		return err
	}
	var flags []string
	if s.quick {
		flags = append(flags, "-quick")
	}
	if s.match != nil {
		flags = append(flags, "-match", s.match.String())
	}
	for rank := 1; rank < size; rank++ {
		w := world
		w.Rank = rank
		wait, e := startMLARank(w, threads, flags, s.stderr)
		if e != nil {
			return e
		}
		defer func() { err = errors.Join(err, wait()) }()
	}
	return s.joinMLA(world, shapes)
}

// joinMLA is the work of one rank. Rank 0 keeps the figures.
func (s *scaling) joinMLA(world ranks.World, shapes []mlaShape) (err error) {
	comm, err := ranks.Join(context.Background(), nil, world, fmt.Sprint(shapes, s.pace.Rounds))
	if err != nil {
		return err
	}
	defer func() {
		comm.Fail(err)
		err = errors.Join(err, comm.Close())
	}()
	for _, c := range shapes {
		if world.Rank == 0 {
			fmt.Fprintln(s.stderr, c)
		}
		if err := s.mlaCase(comm, c); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
	}
	return nil
}

// mlaWays are the ways to compute: all of it on rank 0, the context over ranks, and latent vectors over ranks.
var mlaWays = []string{"one process", "context over %d ranks", "TPLA over %d ranks"}

// mlaCase measures the ways in turn.
func (s *scaling) mlaCase(comm *ranks.Comm, c mlaShape) error {
	const steps = 2
	w := comm.World()
	all := make([]func() error, len(mlaWays))
	for way := range all {
		if way == 0 && w.Rank > 0 {
			continue
		}
		step, closes, err := newMLAStep(comm, c, way)
		if err != nil {
			return err
		}
		defer closes()
		all[way] = step
	}
	times := make([]measure.Samples, len(all))
	for round := range s.pace.Rounds + 1 { // the first one warms up
		for way, step := range all {
			if err := comm.Barrier(); err != nil {
				return err
			}
			if step == nil {
				continue
			}
			t, err := measure.Timed(step)(steps)
			if err != nil {
				return err
			}
			if round > 0 {
				times[way] = append(times[way], t.Seconds()/steps)
			}
		}
	}
	if w.Rank > 0 {
		return nil
	}
	for way, t := range times {
		name := mlaWays[way]
		if way > 0 {
			name = fmt.Sprintf(name, w.Size)
		} else if s.report.Find(c.String(), name, measure.StepMillis) != nil {
			name = fmt.Sprintf("%s of %d threads", name, runtime.GOMAXPROCS(0))
		}
		row := s.report.Row(tableMLA, c.String(), name)
		row.Add(measure.StepMillis, 1e3*t.Median(), nil)
		if way > 0 {
			row.Add(measure.OverOneProcess, t.Faster(times[0]), nil)
		}
	}
	return s.save()
}

// newMLAStep makes a step of one token for each sequence, which leaves the cache as it was. closes frees the cache.
func newMLAStep(comm *ranks.Comm, c mlaShape, way int) (step func() error, closes func(), err error) {
	w, keys, latent := comm.World(), c.keys, c.latent
	switch way {
	case 1:
		from, to := w.Part(c.keys)
		keys = to - from
	case 2:
		if latent%w.Size != 0 {
			return nil, nil, fmt.Errorf("%d elements of a latent vector over %d ranks: want a divisor", latent, w.Size)
		}
		latent /= w.Size
	}
	const page, chunk = 64, 512
	dim := latent + c.rope
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: dim, ValueDim: latent, ValuesInKeys: true, DType: la.BFloat16, PageSize: page, Pages: c.batch * (keys/page + 2)})
	if err != nil {
		return nil, nil, err
	}
	closes = func() { _ = cache.Close() }
	defer func() {
		if err != nil {
			closes()
		}
	}()
	seqs := make([]*la.Sequence, c.batch)
	for i := range seqs {
		if seqs[i], err = cache.NewSequence(); err != nil {
			return nil, nil, err
		}
	}
	rng := rand.New(rand.NewPCG(1, uint64(way)))
	options := []la.Option{la.WithCausal(), la.WithScale(1 / math.Sqrt(192))}
	fill, err := newMLAGraph(cache, rng, chunk, dim, 1, append(slices.Clone(options), la.WithWindow(1)), nil) // the smallest window saves the attention
	if err != nil {
		return nil, nil, err
	}
	defer fill.vm.Close()
	for _, seq := range seqs {
		for seq.Len() < keys {
			if err := fill.run([]la.Append{{Seq: seq, Tokens: min(chunk, keys-seq.Len())}}, true); err != nil {
				return nil, nil, err
			}
		}
	}
	values := normal(rng, c.heads*c.value, latent)
	r, err := newMLAGraph(cache, rng, c.batch, dim, c.heads, options, func(att *G.Node) (*G.Node, error) {
		lse, err := la.LogSumExp(att)
		if err != nil {
			return nil, err
		}
		y, err := nn.HeadLinear(att, input(att.Graph(), "values", values), c.heads)
		switch {
		case err != nil:
			return nil, err
		case way == 1:
			return nn.MergeRanks(y, lse, comm)
		case way == 2:
			return nn.AllReduce(y, comm)
		}
		return y, nil
	})
	if err != nil {
		return nil, nil, err
	}
	appends := make([]la.Append, c.batch)
	for i, seq := range seqs {
		appends[i] = la.Append{Seq: seq, Tokens: 1, QueryOnly: way == 1 && i%w.Size != w.Rank}
	}
	free := closes
	closes = func() { _ = r.vm.Close(); free() }
	return func() error { return r.run(appends, false) }, closes, nil
}

// mlaGraph is a graph with one attention.
type mlaGraph struct {
	step *la.Step
	vm   interface {
		G.VM
		Close() error
	}
}

func newMLAGraph(cache *la.Cache, rng *rand.Rand, rows, dim, heads int, options []la.Option, finish func(*G.Node) (*G.Node, error)) (r mlaGraph, err error) {
	if r.step, err = cache.NewStep(rows); err != nil {
		return r, err
	}
	g := G.NewGraph()
	y, err := la.CachedAttention(input(g, "q", normal(rng, rows, heads*dim)), input(g, "k", normal(rng, rows, dim)), nil, r.step.Layer(0), options...)
	if err == nil && finish != nil {
		_, err = finish(y)
	}
	if err == nil {
		r.vm = G.NewTapeMachine(g)
	}
	return r, err
}

// run runs a step, and keeps its tokens or not.
func (r mlaGraph) run(appends []la.Append, keep bool) error {
	if err := r.step.Set(appends); err != nil {
		return err
	}
	err := la.Cause(r.vm.RunAll())
	r.vm.Reset()
	if err == nil && keep {
		return r.step.Commit()
	}
	return errors.Join(err, r.step.Rollback())
}

func input(g *G.ExprGraph, name string, v *tensor.Dense) *G.Node {
	return G.NewTensor(g, v.Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
}

// normal is a matrix of normal numbers.
func normal(rng *rand.Rand, rows, columns int) *tensor.Dense {
	x := make([]float32, rows*columns)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x))
}

// mlaErrors reports the errors of TPLA.
func (s *scaling) mlaErrors() error {
	const heads, nope, rope, latent, tokens = 8, 32, 16, 128, 128
	rng := rand.New(rand.NewPCG(3, 4))
	x := normal(rng, tokens, latent+rope)
	mix, z := normal(rng, latent, latent).Data().([]float32), make([]float64, latent)
	for i := range tokens {
		for e := range z { // a decaying spectrum
			z[e] = rng.NormFloat64() * math.Exp(-6*float64(e)/latent)
		}
		for k := range latent {
			v := 0.0
			for e, u := range z {
				v += u * float64(mix[k*latent+e])
			}
			x.Data().([]float32)[i*(latent+rope)+k] = float32(v)
		}
	}
	w := &nn.LatentWeights{Heads: heads, Down: normal(rng, latent+rope, 1), Norm: tensor.New(tensor.WithShape(latent), tensor.WithBacking(slices.Repeat([]float32{1}, latent))),
		Key: normal(rng, heads*latent, nope), Value: normal(rng, heads*nope, latent)}
	for i, v := range w.Key.Data().([]float32) {
		w.Key.Data().([]float32)[i] = v / float32(math.Sqrt(latent))
	}
	of := nn.TPLA{Latents: x, Queries: normal(rng, tokens, heads*(nope+rope))}
	for _, c := range []struct {
		name string
		pca  bool
	}{{"Hadamard's matrix", false}, {"eigenvectors", true}} {
		of.PCA = c.pca
		norm, softmax, both, prefilled, err := of.Errors(w, 1/math.Sqrt(nope+rope))
		if err != nil {
			return err
		}
		for i, v := range []float64{norm, softmax, both, prefilled} {
			s.report.Row(tableErrors, []string{"norm", "softmax", "both", "both, behind a prompt"}[i], c.name).Add(measure.RelativeError, v, nil)
		}
	}
	return nil
}
