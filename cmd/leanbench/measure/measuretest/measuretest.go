// Package measuretest has what tests of several packages here need.
package measuretest

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Rand is another one at each run; the log says which.
func Rand(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// Near allows for rounding.
func Near(a, b float64) bool { return a > 0.999*b && a < 1.001*b }

// fakeVariable tells a test's own program that it is the worker that the test talks to.
const fakeVariable = "LEANBENCH_FAKE_WORKER"

// Main is what TestMain calls where tests start workers with Command.
func Main(m *testing.M) {
	if how := os.Getenv(fakeVariable); how != "" {
		fakeWorker(how)
		return
	}
	os.Exit(m.Run())
}

// Command runs the test's own program as a worker that answers in some way.
func Command(t *testing.T, how string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(self)
	c.Env = append(os.Environ(), fakeVariable+"="+how)
	return c
}

// fakeWorker answers with fixed times: a step takes a millisecond, and one of
// the packed way half of that.
func fakeWorker(how string) {
	if how == "broken" {
		fmt.Fprintln(os.Stderr, "cannot import torch")
		os.Exit(3)
	}
	if strings.HasPrefix(how, "rank") {
		fakeRank(how)
		return
	}
	fmt.Println("ok Fake 1.0")
	full := how == "opt-full" // until somebody else has given memory back
	last := ""                // the question before
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		words := strings.Fields(in.Text())
		steps := 0
		fmt.Sscan(words[len(words)-1], &steps)
		if strings.HasSuffix(how, "-dies") && words[0] != "arena" && (strings.Contains(in.Text(), "8192") || words[0] == "run" && strings.Contains(last, "16384")) {
			os.Exit(4)
		}
		last = in.Text()
		switch words[0] {
		case "arena":
			fmt.Fprintln(os.Stderr, in.Text())
			fmt.Println("ok")
		case "batch":
			fmt.Println("ok")
		case "shape", "sdpa", "prompts":
			fmt.Fprintln(os.Stderr, in.Text())
			switch {
			case how == "gpu-strange":
				fmt.Println("ok magic")
			case how == "gpu-refuses":
				fmt.Println("error out of memory")
			case strings.HasPrefix(how, "gpu"):
				fmt.Println("ok flash flashinfer without cudnn: too old")
			default:
				fmt.Println("ok")
			}
		case "linear":
			fmt.Println("ok cublas")
		case "model", "forget", "threads":
			fmt.Fprintln(os.Stderr, in.Text())
			fmt.Println("ok")
		case "read":
			fmt.Fprintln(os.Stderr, in.Text())
			switch compiled := words[1] == "compiled"; {
			case compiled && how == "opt-skips":
				fmt.Println("ok 3 CUDA graphs were skipped")
			case full:
				full = false
				fmt.Println("error OutOfMemoryError('CUDA out of memory. Tried to')")
			case compiled && how == "opt-silent":
			case compiled && how == "opt-refuses":
				fmt.Println("error no memory")
			default:
				fmt.Println("ok")
			}
		case "run":
			if strings.HasPrefix(how, "opt") {
				each, text := 4e-3, "7 8 9"
				if words[1] == "eager" {
					each = 40e-3
				}
				if words[1] == "eager" && how == "opt-differs" {
					text = "1 2 3"
				}
				fmt.Println("ok", float64(steps)*each, text)
				continue
			}
			if strings.HasPrefix(how, "gpu") {
				time := map[string]string{"gpu-none": " 0"}[how]
				if time == "" {
					time = " 1e-3"
				}
				if how == "gpu-few" {
					steps--
				}
				fmt.Println("ok" + strings.Repeat(time, steps))
				continue
			}
			each := 1e-3
			if words[1] == "packed" {
				each /= 2
			}
			fmt.Println("ok", float64(steps)*each)
		case "prompt":
			fmt.Fprintln(os.Stderr, in.Text())
			fmt.Println("ok", 4e-3, 7)
		case "decode":
			fmt.Println("ok", 0.5, float64(steps)*1e-3, 7, 8, 9)
		case "refuse":
			fmt.Println("error no such shape")
		case "chat":
			fmt.Println("well ...")
		case "die":
			fmt.Fprintln(os.Stderr, "out of memory")
			os.Exit(4)
		}
	}
}

// fakeRank answers as one of leanbench's ranks does: rank r takes r+1 milliseconds for each step. Rank 1 may be short of memory, or
// fail.
func fakeRank(how string) {
	rank := 0
	fmt.Sscan(os.Getenv("RANK"), &rank)
	if how == "rank-alone" {
		fmt.Println("ok without no NCCL")
		os.Exit(1)
	}
	fmt.Fprintln(os.Stderr, strings.Join(os.Args[1:], " "))
	fmt.Println("ok 1.2.3")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		fmt.Fprintln(os.Stderr, in.Text())
		words := strings.Fields(in.Text())
		steps := 0
		fmt.Sscan(words[len(words)-1], &steps)
		switch question := words[0]; {
		case how == "rank-short" && question == "read" && words[1] == "16":
			if rank == 1 {
				fmt.Println("ok without memory")
			} else {
				fmt.Println("error rank 1: memory")
			}
			os.Exit(1)
		case how == "rank-fails" && question == "steps" && rank == 1:
			fmt.Println("error it is broken")
			os.Exit(1)
		case how == "rank-mute" && question == "steps":
			fmt.Println("ok")
		case question == "steps", question == "again":
			fmt.Println("ok", float64(steps)*float64(rank+1)*1e-3, 7+rank, 8)
		default:
			fmt.Println("ok")
		}
	}
}
