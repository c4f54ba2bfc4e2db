//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package nccl_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/nccl"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/internal/rendezvous"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(rankstest.Main{M: m}) }

// encode is numbers as a type has them.
func encode(x []float32, t nccl.Type) (b []byte) {
	for _, v := range x {
		switch t {
		case nccl.Float16:
			b = binary.LittleEndian.AppendUint16(b, uint16(half.FromFloat32(v)))
		case nccl.BFloat16:
			b = binary.LittleEndian.AppendUint16(b, uint16(half.BFromFloat32(v)))
		default:
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
		}
	}
	return b
}

// All collectives, of all types, at once and in a capture, between three processes.
func TestCollectives(t *testing.T) {
	if !rankstest.Child() {
		for rank, r := range rankstest.Run(t, 3, nil) {
			if r.Err != nil || r.Text != "done" {
				t.Errorf("rank %d: %q, %v\n%s", rank, r.Text, r.Err, r.Output)
			}
		}
		return
	}
	rank, _ := strconv.Atoi(os.Getenv("RANK"))
	size, _ := strconv.Atoi(os.Getenv("WORLD_SIZE"))
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	lib, err := nccl.Load()
	must(err)
	fake := fakedriver.System(t)
	fake.State().Late = uint64(rank)*7 + 1
	drv, err := cuda.Load()
	must(err)
	dev, err := drv.Open(rank % 2)
	must(err)
	s, err := dev.NewStream()
	must(err)
	session, id, err := rendezvous.Join(context.Background(), rendezvous.Config{Rank: rank, Size: size, Address: os.Getenv("MASTER_ADDR") + ":" + os.Getenv("MASTER_PORT"),
		Timeout: time.Minute, Beat: time.Second, Silence: 10 * time.Second}, func() ([]byte, error) { id, err := lib.UniqueID(); return id[:], err })
	must(err)
	comm, err := lib.Init(dev, size, rank, (*nccl.ID)(id))
	must(err)

	in, err := dev.NewBuffer(1 << 18)
	must(err)
	out, err := dev.NewBuffer(1 << 19)
	must(err)
	rng := rand.New(rand.NewPCG(1, 2)) // the same on all ranks
	for turn := range 24 {
		dtype := []nccl.Type{nccl.Float32, nccl.Float16, nccl.BFloat16}[turn%3]
		elem := len(encode([]float32{0}, dtype))
		n, at := []int{1, 7, 1000, 40_000}[rng.IntN(4)], int64(elem*rng.IntN(9))
		if turn%2 == 1 {
			n = 1 + rng.IntN(300)
		}
		parts, sum := make([][]float32, size), make([]float32, n)
		for r := range parts {
			for i := range n {
				x := float32(rng.IntN(64) - 32) // whose sums are exact in all types
				parts[r] = append(parts[r], x)
				sum[i] += x
			}
		}
		src := nccl.Part{Buffer: in, Offset: at, N: n}
		dst := nccl.Part{Buffer: out, Offset: 2 * at, N: n}
		var want []byte
		var queue func() error
		switch turn % 4 {
		case 0, 1:
			want = encode(sum, dtype)
			queue = func() error { return comm.AllReduce(s, dst, src, dtype) }
		case 2:
			from := rng.IntN(size)
			want = encode(parts[from], dtype)
			queue = func() error { return comm.Broadcast(s, dst, src, dtype, from) }
		default:
			for _, p := range parts {
				want = append(want, encode(p, dtype)...)
			}
			dst.N *= size
			queue = func() error { return comm.AllGather(s, dst, src, dtype) }
		}
		must(in.Upload(at, encode(parts[rank], dtype)))
		must(out.Set(0, 0xff, out.Len()))
		if rng.IntN(2) == 0 {
			must(queue())
		} else {
			g, err := s.Capture(queue)
			must(err)
			must(s.Launch(g))
			must(s.Synchronize())
			must(out.Set(0, 0xff, out.Len()))
			must(s.Launch(g)) // and again
			defer g.Close()
		}
		must(comm.Barrier(s))
		must(s.Synchronize())
		got := make([]byte, len(want)+1)
		must(out.Download(got, dst.Offset))
		if !bytes.Equal(got[:len(want)], want) || got[len(want)] != 0xff {
			t.Fatalf("turn %d, rank %d: %d of type %d: %.40x, want %.40x", turn, rank, n, dtype, got, want)
		}
		must(comm.AsyncError())
	}
	must(session.Barrier())
	must(comm.Close())
	must(session.Close())
	must(dev.Close())
	if fake.Live() != 0 || fake.Defects() != 0 {
		t.Errorf("%d left, %d defects", fake.Live(), fake.Defects())
	}
	rankstest.Write(t, "done")
}
