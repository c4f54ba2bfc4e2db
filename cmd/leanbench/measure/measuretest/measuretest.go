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
	fmt.Println("ok Fake 1.0")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		words := strings.Fields(in.Text())
		steps := 0
		fmt.Sscan(words[len(words)-1], &steps)
		switch words[0] {
		case "arena":
			fmt.Fprintln(os.Stderr, in.Text())
			fmt.Println("ok")
		case "batch":
			fmt.Println("ok")
		case "shape", "prompts":
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
