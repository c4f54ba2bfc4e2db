//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package ranks_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	"go.uber.org/goleak"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(rankstest.Main{M: m}) }

// rank is this process among those of a test.
type rank struct {
	*testing.T
	world  ranks.World
	gpu    *device.GPU
	comm   *ranks.Comm
	driver *fakedriver.Library
}

// gpusVariable is the numbers of each rank's GPUs, where they have not one each.
const gpusVariable = "RANKS_TEST_GPUS"

// sameVariable is what all ranks must have alike.
const sameVariable = "RANKS_TEST_SAME"

// twoEach gives two ranks two GPUs each.
const twoEach = gpusVariable + "=0,1;2,3"

// open opens a rank's GPU, or several.
func open(w ranks.World) (*device.GPU, error) {
	text, set := os.LookupEnv(gpusVariable)
	if !set {
		return w.OpenGPU()
	}
	var ordinals []int
	for _, n := range strings.Split(strings.Split(text, ";")[w.Rank], ",") {
		i, err := strconv.Atoi(n)
		if err != nil {
			return nil, err
		}
		ordinals = append(ordinals, i)
	}
	return device.Open(ordinals...)
}

// join is the beginning of a rank's part of a test.
func join(t *testing.T) *rank {
	t.Helper()
	r := &rank{T: t, driver: system.Emulate(t)}
	var err error
	if r.world, err = ranks.Environment(); err != nil {
		t.Fatal(err)
	}
	if r.gpu, err = open(r.world); err != nil {
		t.Fatal(err)
	}
	if r.comm, err = ranks.Join(t.Context(), r.gpu, r.world); err != nil {
		t.Fatal(err)
	}
	return r
}

// leave is its end.
func (r *rank) leave() {
	r.Helper()
	if err := errors.Join(r.comm.Close(), r.gpu.Close()); err != nil {
		r.Error(err)
	}
}

func (r *rank) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// part is a rank's part of a matrix, of its rows or its columns.
func part(w ranks.World, x *tensor.Dense, axis int) *tensor.Dense {
	from, to := w.Part(x.Shape()[axis])
	s := make([]tensor.Slice, 2)
	s[axis] = G.S(from, to)
	v, err := x.Slice(s...)
	if err != nil {
		panic(err)
	}
	return v.Materialize().(*tensor.Dense)
}

const (
	width, heads, headDim, inner, words, layers = 64, 4, 64, 64, 32, 1
	tokens                                      = 3
)

// decoder is a small decoder of this rank's heads and features. It returns the tokens that it
// has chosen one after the other, and the bits of the last logits.
func decoder(r *rank) (text string) {
	rng := rand.New(rand.NewPCG(3, 4)) // the same on all ranks
	matrix := func(rows, columns int) *tensor.Dense {
		x := make([]float32, rows*columns)
		for i := range x {
			x[i] = float32(rng.NormFloat64() / math.Sqrt(float64(columns)) * 1.5)
		}
		return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x))
	}
	g := G.NewGraph()
	n := 0
	const rows, columns, all = 0, 1, 2 // what each of several GPUs has
	there := func(x tensor.Tensor, each int) *G.Node {
		d, err := r.gpu.UploadReplicated(x)
		if each != all {
			r.must(errors.Join(err, d.Free()))
			d, err = r.gpu.UploadSharded(x, each)
		}
		r.must(err)
		n++
		return G.NewTensor(g, d.Dtype(), len(d.Shape()), G.WithShape(d.Shape()...), G.WithName(fmt.Sprint("input ", n)), G.WithValue(d))
	}
	node := func(y *G.Node, err error) *G.Node { r.Helper(); r.must(err); return y }

	ids, err := r.gpu.UploadReplicated(tensor.New(tensor.WithShape(1), tensor.WithBacking([]int32{7})))
	r.must(err)
	token := G.NewTensor(g, tensor.Int32, 1, G.WithShape(1), G.WithName("token"), G.WithValue(ids))
	embeddings := matrix(words, width)
	table := there(embeddings, all)
	from, to := r.world.Part(heads)
	cache, err := la.NewCache(la.CacheConfig{Layers: layers, KVHeads: to - from, HeadDim: headDim, Pages: 8, PageSize: 16, Device: r.gpu})
	r.must(err)
	defer cache.Close()
	step, err := cache.NewStep(1)
	r.must(err)

	h := node(nn.Embedding(table, token, nil))
	for i := range layers {
		// Partial sums: bias and residual are rank 0's.
		sum := func(x *G.Node, w *tensor.Dense, bias *tensor.Dense, residual *G.Node) *G.Node {
			var b *G.Node
			var opts []nn.Option
			if r.world.Rank == 0 {
				b = there(bias, all)
				opts = append(opts, nn.WithResidual(residual))
			}
			y := node(nn.Linear(x, there(part(r.world, w, 1), columns), b, opts...))
			return node(nn.AllReduce(y, r.comm))
		}
		vector := func(n int) *tensor.Dense {
			x := matrix(1, n)
			r.must(x.Reshape(n))
			return x
		}
		var qkv [3]*G.Node
		for j := range qkv {
			qkv[j] = node(nn.Linear(h, there(part(r.world, matrix(heads*headDim, width), 0), rows), nil, nn.WithNorm(nil, nil, 1e-5)))
		}
		att := node(la.CachedAttention(qkv[0], qkv[1], qkv[2], step.Layer(i), la.WithCausal()))
		h = sum(att, matrix(width, heads*headDim), vector(width), h)
		x := node(nn.Linear(h, there(part(r.world, matrix(inner, width), 0), rows), nil, nn.WithNorm(nil, nil, 1e-5), nn.WithActivation(nn.GELU)))
		h = sum(x, matrix(width, inner), vector(width), h)
	}
	logits := node(nn.Linear(h, there(embeddings, rows), nil, nn.WithNorm(nil, nil, 1e-5)))
	chosen := node(nn.Broadcast(node(nn.ArgMax(logits)), r.comm, 0))

	vm := G.NewTapeMachine(g)
	defer vm.Close()
	seq, err := cache.NewSequence()
	r.must(err)
	var recording *device.Recording
	defer func() { _ = recording.Close() }()
	for i := range tokens {
		r.must(step.Run([]la.Append{{Seq: seq, Tokens: 1}}, func() error {
			switch i {
			case 0:
				defer vm.Reset()
				r.driver.Forget()
				if err := la.Cause(vm.RunAll()); err != nil {
					return err
				}
				queued := strings.Count(r.driver.Log(), "fake_queue") // collectives, of all GPUs
				if want := (2*layers + 1) * len(r.gpu.Members()); r.world.Size > 1 && queued != want {
					r.Errorf("%d collectives, want %d", queued, want)
				}
				return nil
			case 1:
				defer vm.Reset()
				if recording, err = r.gpu.Record(vm.RunAll); err != nil {
					return err
				}
			}
			return recording.Replay()
		}))
		next := chosen.Value().(*device.Tensor)
		t, err := next.Download()
		r.must(err)
		text += fmt.Sprint(t.Data().([]int32)[0], " ")
		r.must(ids.CopyFrom(next))
	}
	if r.comm.World().Size > 1 {
		if err := r.comm.Close(); !errors.Is(err, la.ErrState) {
			r.Errorf("Close beside a recording: %v", err)
		}
	}
	t, err := logits.Value().(*device.Tensor).Download()
	r.must(err)
	text += "\n"
	for _, x := range t.Data().([]float32) {
		text += fmt.Sprintln(x)
	}
	return text
}

// refusals are what is no work for ranks.
func refusals(r *rank) {
	is := func(what string, err, want error, text string) {
		r.Helper()
		if !errors.Is(la.Cause(err), want) || !strings.Contains(err.Error(), text) {
			r.Errorf("%s: %v, want %v and %q", what, err, want, text)
		}
	}
	g := G.NewGraph()
	host := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(make([]float32, 6)))
	x := G.NewTensor(g, tensor.Float32, 2, G.WithShape(2, 3), G.WithName("x"), G.WithValue(host))
	ids := G.NewTensor(g, tensor.Int32, 1, G.WithShape(3), G.WithName("ids"), G.WithValue(tensor.New(tensor.WithShape(3), tensor.WithBacking(make([]int32, 3)))))
	y, err := nn.AllReduce(x, r.comm)
	r.must(err)
	_, err = nn.AllReduce(nil, r.comm)
	is("nil x", err, la.ErrGraph, "AllReduce: x is nil")
	_, err = nn.AllReduce(x, nil)
	is("nil comm", err, la.ErrState, "ranks.Join")
	_, err = nn.AllReduce(ids, r.comm)
	is("int32", err, la.ErrDType, `x, node "ids", is of int32`)
	_, err = nn.Broadcast(ids, r.comm, r.world.Size)
	is("a rank", err, la.ErrOption, fmt.Sprintf("rank %d, outside [0, %d)", r.world.Size, r.world.Size))
	if r.world.Size == 1 {
		if y != x {
			r.Error("AllReduce of a world of one is another node")
		}
		return
	}
	vm := G.NewTapeMachine(g)
	is("host memory", vm.RunAll(), la.ErrUnsupported, "AllReduce: x is in host memory")
	r.must(vm.Close())
	if _, err := G.Grad(G.Must(G.Sum(y)), x); err == nil || !strings.Contains(err.Error(), "gradient") {
		r.Errorf("a gradient: %v", err)
	}
	_, err = ranks.Join(r.Context(), r.gpu, r.world)
	is("a second Join", err, la.ErrState, "among ranks already")
}

// Two ranks, of two GPUs each, make what one makes: the same tokens, logits up to rounding, and both the same bits.
func TestDecoder(t *testing.T) {
	if rankstest.Child() {
		r := join(t)
		text := decoder(r)
		refusals(r)
		r.leave()
		rankstest.Write(t, text)
		return
	}
	t.Parallel()
	one, two := rankstest.Run(t, 1, nil), rankstest.Run(t, 2, []string{twoEach})
	alike(t, one, two)
	if reftest.Every(t) {
		alike(t, one, rankstest.Run(t, 2, nil))
	}
}

// alike checks that two ranks make what one does.
func alike(t *testing.T, one, two []rankstest.Rank) {
	t.Helper()
	for _, r := range append(one, two...) {
		if r.Err != nil || r.Text == "" {
			t.Fatalf("%v\n%s", r.Err, r.Output)
		}
	}
	if two[0].Text != two[1].Text {
		t.Errorf("the ranks differ:\n%s\n%s", two[0].Text, two[1].Text)
	}
	a, b := strings.Split(one[0].Text, "\n"), strings.Split(two[0].Text, "\n")
	if a[0] != b[0] || len(a) != words+2 || len(b) != len(a) {
		t.Fatalf("one process chose %s, two %s", a[0], b[0])
	}
	for i := 1; i <= words; i++ {
		var x, y float64
		fmt.Sscan(a[i], &x)
		fmt.Sscan(b[i], &y)
		if !(math.Abs(x-y) < 1e-4) {
			t.Errorf("logit %d: %v of one process, %v of two", i-1, x, y)
		}
	}
}

// sums runs an AllReduce of n elements until f says that it is enough.
func (r *rank) sums(n int, f func(i int) bool) error {
	g := G.NewGraph()
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.world.Rank + 1)
	}
	d, err := r.gpu.UploadReplicated(tensor.New(tensor.WithShape(n), tensor.WithBacking(x)))
	r.must(err)
	in := G.NewTensor(g, tensor.Float32, 1, G.WithShape(n), G.WithName("x"), G.WithValue(d))
	y, err := nn.AllReduce(in, r.comm)
	r.must(err)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	for i := 0; f(i); i++ {
		if err := la.Cause(vm.RunAll()); err != nil {
			return err
		}
		t, err := y.Value().(*device.Tensor).Download()
		if err != nil {
			return err
		}
		vm.Reset()
		want := float32(r.world.Size * (r.world.Size + 1) / 2)
		for i, x := range t.Data().([]float32) {
			if x != want {
				r.Fatalf("element %d of %d: %v, want %v", i, n, x, want)
			}
		}
	}
	return nil
}

// failing checks that all ranks but one end with an error that names it, and soon.
func failing(t *testing.T, all []rankstest.Rank, bad int, within time.Duration, text string) {
	t.Helper()
	for rank, r := range all {
		if rank == bad {
			continue
		}
		if r.Err != nil || !strings.Contains(r.Text, fmt.Sprintf("rank %d: ", bad)) || !strings.Contains(r.Text, text) || r.Took > within {
			t.Errorf("rank %d after %v: %q, %v; want rank %d and %q\n%s", rank, r.Took, r.Text, r.Err, bad, text, r.Output)
		}
	}
}

// A rank that is killed in the middle of sums ends the others.
func TestKilled(t *testing.T) {
	if rankstest.Child() {
		r := join(t)
		err := r.sums(1000, func(i int) bool {
			if i == 3 && r.world.Rank == 1 {
				os.Exit(9)
			}
			return true
		})
		if !errors.Is(err, la.ErrRank) {
			t.Errorf("%v, want %v", err, la.ErrRank)
		}
		rankstest.Write(t, fmt.Sprint(err))
		r.leave()
		return
	}
	t.Parallel()
	failing(t, rankstest.Run(t, 3, nil), 1, 40*time.Second, "it has ended")
}

// A rank that gives up says why, and all others tell it.
func TestGivesUp(t *testing.T) {
	if rankstest.Child() {
		r := join(t)
		err := r.sums(70_000, func(i int) bool {
			if i == 2 && r.world.Rank == 0 {
				r.comm.Fail(errors.New("no more memory"))
			}
			return i < 100
		})
		if !errors.Is(r.comm.Err(), la.ErrRank) {
			t.Errorf("Err: %v", r.comm.Err())
		}
		rankstest.Write(t, fmt.Sprint(err))
		r.leave()
		return
	}
	t.Parallel()
	failing(t, rankstest.Run(t, 2, []string{twoEach}), 0, 40*time.Second, "no more memory")
}

// A rank that does not take part is found out by the time limit.
func TestDoesNotTakePart(t *testing.T) {
	if !reftest.Every(t) {
		t.Skip("it waits for the time limit")
	}
	if rankstest.Child() {
		r := join(t)
		if r.world.Rank == 1 {
			for r.comm.Err() == nil {
				time.Sleep(10 * time.Millisecond)
			}
			rankstest.Write(t, fmt.Sprint(r.comm.Err()))
		} else {
			rankstest.Write(t, fmt.Sprint(r.sums(10, func(i int) bool { return i < 1 })))
		}
		r.leave()
		return
	}
	failing(t, rankstest.Run(t, 2, []string{"LEANATTENTION_RANKS_TIMEOUT=10s"}), 0, 40*time.Second, "waited for the others for 10s")
}

// An asynchronous error of NCCL ends all ranks.
func TestAsynchronousError(t *testing.T) {
	if rankstest.Child() {
		r := join(t)
		rankstest.Write(t, fmt.Sprint(r.sums(10, func(i int) bool { return i < 1000 })))
		r.leave()
		return
	}
	t.Parallel()
	all := rankstest.Run(t, 2, []string{"FAKE_NCCL_ASYNC=3", twoEach})
	for rank, r := range all {
		if r.Err != nil || !strings.Contains(r.Text, "remote process exited") || !strings.Contains(r.Text, "rank ") {
			t.Errorf("rank %d: %q, %v\n%s", rank, r.Text, r.Err, r.Output)
		}
	}
}

// What keeps ranks from coming together is an error of all that are there.
func TestDoNotMeet(t *testing.T) {
	if rankstest.Child() {
		system.Emulate(t)
		world, err := ranks.Environment()
		if err == nil {
			var gpu *device.GPU
			if gpu, err = open(world); err != nil {
				t.Fatal(err)
			}
			defer gpu.Close()
			var comm *ranks.Comm
			if comm, err = ranks.Join(t.Context(), gpu, world, os.Getenv(sameVariable)); err == nil {
				comm.Close()
			}
		}
		rankstest.Write(t, fmt.Sprint(err))
		return
	}
	t.Parallel()
	quick := "LEANATTENTION_RANKS_TIMEOUT=1s"
	for _, c := range []struct {
		name    string
		env     []string
		without []int
		want    []string // of each rank
	}{
		{"never comes", []string{quick}, []int{1}, []string{"rank 1: it has not come to 127.0.0.1:", ""}},
		{"never comes, rank 0", []string{quick}, []int{0}, []string{"", "rank 0: it does not answer at 127.0.0.1:"}},
		{"no library", []string{"LEANATTENTION_NCCL=/nowhere/libnccl.so.2"}, nil, []string{"looked for /nowhere/libnccl.so.2 (LEANATTENTION_NCCL)", "no NCCL"}},
		{"old library", []string{"FAKE_NCCL_VERSION=22105"}, nil, []string{"it is NCCL 2.21.5, 2.23 is the oldest", "too old"}},
		{"init fails", []string{"FAKE_NCCL_FAIL=ncclCommInitRankScalable"}, nil, []string{"was told to fail", "was told to fail"}},
		{"numbers of GPUs", []string{gpusVariable + "=0,1;2"}, nil, []string{`rank 1: it has "one GPU", and rank 0 has "2 GPUs"`, `rank 1: it has "one GPU", and rank 0 has "2 GPUs"`}},
		{"what must be alike", []string{sameVariable + "=seed %d"}, nil, []string{`rank 1: it has "seed 1", and rank 0 has "seed 0"`, `rank 1: it has "seed 1", and rank 0 has "seed 0"`}},
		{"jobs", []string{"LEANATTENTION_JOB=job %d", quick}, nil, []string{`rank 1 of 2 is of job "job 1"`, `rank 1: rank 0 at 127.0.0.1:`}},
		{"secrets", []string{"LEANATTENTION_SECRET=0123456789abcdef%d", quick}, nil, []string{`rank 1 of 2 has another secret`, `has turned it away: rank 1 of 2 has another secret than rank 0`}},
		{"short secret", []string{"LEANATTENTION_SECRET=%d"}, nil, []string{"LEANATTENTION_SECRET: a secret of 1 bytes", "LEANATTENTION_SECRET: a secret of 1 bytes"}},
		{"wrong rank", []string{"LOCAL_RANK=x%d"}, nil, []string{`LOCAL_RANK is "x0"`, `LOCAL_RANK is "x1"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for rank, r := range rankstest.Run(t, 2, c.env, c.without...) {
				if strings.Contains(r.Text, "rank 1: rank 1:") {
					t.Errorf("rank %d says it twice: %q", rank, r.Text)
				}
				if c.want[rank] != "" && (r.Err != nil || !strings.Contains(r.Text, c.want[rank])) {
					t.Errorf("rank %d: %q, %v; want %q\n%s", rank, r.Text, r.Err, c.want[rank], r.Output)
				}
			}
		})
	}
}

// Ranks on GPUs that train together have the weights of host memory.
func TestTrains(t *testing.T) {
	if rankstest.Child() {
		r := join(t)
		text := trainedTexts(t, r.comm, r.gpu)
		// Weights in the other place.
		w := tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{1, 2, 3}))
		if err := (&nn.SGD{Ranks: r.comm}).Step([]G.ValueGrad{pair{w, w.Clone().(*tensor.Dense)}}); r.world.Size > 1 && !errors.Is(err, la.ErrUnsupported) {
			t.Errorf("weights in host memory: %v", err)
		}
		rankstest.Write(t, text)
		r.leave()
		return
	}
	t.Parallel()
	size := 2
	if reftest.Every(t) {
		size = 3
	}
	var texts []string
	for _, r := range rankstest.Run(t, size, nil) {
		if r.Err != nil {
			t.Fatalf("%v\n%s", r.Err, r.Output)
		}
		texts = append(texts, r.Text)
	}
	alikeTrained(t, texts...)
}

// TestTrainsInOneProcess: the GPUs of one process, each a rank of its own with a goroutine, train as ranks in several processes do.
func TestTrainsInOneProcess(t *testing.T) {
	const gpus = 2
	if !rankstest.Child() {
		if !reftest.Every(t) {
			t.Skip("slow: LEANATTENTION_TESTS=all")
		}
		t.Parallel()
		r := rankstest.Run(t, 1, nil)[0]
		if r.Err != nil {
			t.Fatalf("%v\n%s", r.Err, r.Output)
		}
		alikeTrained(t, strings.Split(r.Text, ";")...)
		return
	}
	system.Emulate(t)
	address := "127.0.0.1:" + os.Getenv("MASTER_PORT")
	var texts [gpus]string
	t.Run("all", func(t *testing.T) {
		for i := range texts {
			t.Run(fmt.Sprint("rank ", i), func(t *testing.T) {
				t.Parallel()
				gpu, err := device.Open(i)
				if err != nil {
					t.Fatal(err)
				}
				defer gpu.Close()
				comm, err := ranks.Join(t.Context(), gpu, ranks.World{Rank: i, Size: gpus, Address: address})
				if err != nil {
					t.Fatal(err)
				}
				texts[i] = trainedTexts(t, comm, gpu)
				if err := comm.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	})
	rankstest.Write(t, strings.Join(texts[:], ";"))
}

// pair is a weight and its gradient.
type pair struct{ value, grad G.Value }

func (p pair) Value() G.Value         { return p.value }
func (p pair) Grad() (G.Value, error) { return p.grad, nil }

// TestContext is TestHostContext of two ranks with a GPU each.
func TestContext(t *testing.T) {
	if !rankstest.Child() {
		for rank, r := range rankstest.Run(t, 2, nil) {
			if r.Err != nil || r.Text != allRight(2, rank) {
				t.Errorf("rank %d: %v: %q\n%s", rank, r.Err, r.Text, r.Output)
			}
		}
		return
	}
	mlaWidth, mlaNope, mlaRope, mlaValue = 8, 8, 8, 4
	r := join(t)
	testContext(t, r.comm, r.gpu, reftest.Cases(t, 16, 40), 1e-4)
	r.leave()
	rankstest.Write(t, allRight(r.world.Size, r.world.Rank))
}
