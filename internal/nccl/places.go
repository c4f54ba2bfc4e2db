package nccl

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Variable names the library in the environment: a file, or a folder that has it. If it is
// set nothing else is tried.
const Variable = "LEANATTENTION_NCCL"

const fileName = "libnccl.so.2"

// place is where the library may be.
type place struct {
	what string // in errors
	path string // name or pattern
}

// places are where the library is looked for, in this order: what [Variable] says; else the
// loader's path, the Python environment that is active (VIRTUAL_ENV, CONDA_PREFIX) or of the
// python3 of PATH, and the system's and the user's Python packages.
func places(env func(string) string) (all []place) {
	if at := env(Variable); at != "" {
		if info, err := os.Stat(at); err == nil && info.IsDir() {
			at = filepath.Join(at, fileName)
		}
		return []place{{Variable, at}}
	}
	all = []place{{"the loader's path", fileName}}
	in := func(what, prefix string) {
		first := filepath.Join(prefix, "lib", fileName)
		if prefix == "" || slices.ContainsFunc(all, func(p place) bool { return p.path == first }) {
			return
		}
		all = append(all, place{what, first})
		for _, packages := range []string{"site-packages", "dist-packages"} {
			all = append(all, place{what, filepath.Join(prefix, "lib", "python3*", packages, "nvidia", "nccl", "lib", fileName)})
		}
	}
	in("VIRTUAL_ENV", env("VIRTUAL_ENV"))
	in("CONDA_PREFIX", env("CONDA_PREFIX"))
	if python, err := exec.LookPath("python3"); err == nil {
		in("python3 of PATH", filepath.Dir(filepath.Dir(python)))
	}
	in("the system's Python", "/usr/local")
	in("the system's Python", "/usr")
	if home := env("HOME"); home != "" {
		in("the user's Python", filepath.Join(home, ".local"))
	}
	return all
}

// files are those that a place stands for. A name without a folder is the loader's.
func (p place) files() []string {
	if !filepath.IsAbs(p.path) && p.what != Variable {
		return []string{p.path}
	}
	found, err := filepath.Glob(p.path)
	if err != nil || len(found) == 0 {
		return nil
	}
	slices.Reverse(found) // newer Pythons first
	return found
}

// find opens the first library that will do.
func find(all []place) (*Library, error) {
	var tried []string
	var first error
	for _, p := range all {
		files := p.files()
		if len(files) == 0 {
			tried = append(tried, fmt.Sprintf("%s (%s): not there", p.path, p.what))
		}
		for _, file := range files {
			l, err := LoadFrom(file)
			if err == nil {
				return l, nil
			}
			why := strings.TrimSuffix(strings.TrimSuffix(err.Error(), ": "+ErrNoNCCL.Error()), ": "+ErrTooOld.Error())
			tried = append(tried, fmt.Sprintf("%s (%s): %s", file, p.what, strings.TrimPrefix(why, file+": ")))
			if first == nil || errors.Is(err, ErrTooOld) {
				first = err
			}
		}
	}
	kind := ErrNoNCCL
	if errors.Is(first, ErrTooOld) {
		kind = ErrTooOld
	}
	return nil, fmt.Errorf("%w: looked for %s; pip install nvidia-nccl-cu12 has it, and %s may name it", kind, strings.Join(tried, ", "), Variable)
}
