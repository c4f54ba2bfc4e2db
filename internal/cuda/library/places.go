package library

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// Place is where a library may be.
type Place struct {
	What   string // in errors
	Path   string // a name or a pattern
	loader bool   // it is a name for the loader
}

// Search says where a library is looked for.
type Search struct {
	Variable string   // of the environment: a file, or a folder with one of Names. If it is set, nothing else is tried
	Names    []string // file names, the preferred one first
	Folders  []string // in site-packages
}

// Places lists where the library is looked for, in this order: what the variable says; else the loader's path, the active Python
// environment (VIRTUAL_ENV, CONDA_PREFIX) or that of the python3 of PATH, and the system's and the user's Python packages.
func (s *Search) Places(env func(string) string) (all []Place) {
	if at := env(s.Variable); at != "" {
		info, err := os.Stat(at)
		if err != nil || !info.IsDir() {
			return []Place{{What: s.Variable, Path: at}}
		}
		for _, name := range s.Names {
			all = append(all, Place{What: s.Variable, Path: filepath.Join(at, name)})
		}
		return all
	}
	for _, name := range s.Names {
		all = append(all, Place{"the loader's path", name, true})
	}
	in := func(what, prefix string) {
		if prefix == "" || slices.ContainsFunc(all, func(p Place) bool { return p.Path == filepath.Join(prefix, "lib", s.Names[0]) }) {
			return
		}
		for _, name := range s.Names {
			all = append(all, Place{What: what, Path: filepath.Join(prefix, "lib", name)})
			for _, folder := range s.Folders {
				for _, packages := range []string{"site-packages", "dist-packages"} {
					all = append(all, Place{What: what, Path: filepath.Join(prefix, "lib", "python3*", packages, folder, name)})
				}
			}
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

// Files returns the files that a place stands for. A name for the loader stands for itself.
func (p Place) Files() []string {
	if p.loader {
		return []string{p.Path}
	}
	found, err := filepath.Glob(p.Path)
	if err != nil || len(found) == 0 {
		return nil
	}
	slices.Reverse(found) // newer Pythons first
	return found
}
