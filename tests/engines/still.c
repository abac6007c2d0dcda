/* still.c: a program that needs no library, for images that have none. It says how many files its root has in a folder. */
#include <dirent.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        DIR *folder = opendir(argv[i]);
        int count = 0;
        while (folder && readdir(folder))
            count++;
        printf("%s %d\n", argv[i], folder ? count - 2 : -1);
    }
    fflush(stdout);
    if (argc == 1)
        pause();
    return 0;
}
